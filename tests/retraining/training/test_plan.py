"""How much traffic is enough, what is learned, and what is held out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from driftguard.retraining.training.plan import (
    CapturedRequest,
    Change,
    LeftOut,
    NothingToDo,
    Plan,
    PlanRules,
    is_held_out,
    plan,
)

CHANGED_AT = datetime(2026, 3, 1, 14, 5, tzinfo=UTC)
RULES = PlanRules(minimum_requests=128, aim_requests=512, wait=timedelta(hours=1), heldout_fraction=0.2)
CHANGE = Change({"german": CHANGED_AT}, CHANGED_AT + timedelta(minutes=5))
AT_ONCE = CHANGE.opened_at + timedelta(seconds=1)
LATER = CHANGE.opened_at + timedelta(hours=1)


def captured(segment: str, count: int, at: datetime = CHANGED_AT, tokens: int = 64) -> list[CapturedRequest]:
    return [
        CapturedRequest(f"{segment}-{at:%H}-{number}", segment, at + timedelta(seconds=number), tokens, 48)
        for number in range(count)
    ]


def refused(requests: list[CapturedRequest], now: datetime = LATER) -> NothingToDo:
    found = plan(requests, CHANGE, RULES, now)
    assert isinstance(found, NothingToDo)
    return found


def planned(requests: list[CapturedRequest], change: Change | None = CHANGE) -> Plan:
    found = plan(requests, change, RULES, LATER)
    assert isinstance(found, Plan)
    return found


def test_below_the_minimum_nothing_is_done_and_the_numbers_are_named() -> None:
    found = refused(captured("german", 37) + captured("code", 1_000))
    assert found.reason == "only 37 captured requests since the change, 128 needed"
    assert found.waits_for_traffic


def test_requests_before_the_change_do_not_count() -> None:
    found = refused(captured("german", 500, CHANGED_AT - timedelta(hours=2)) + captured("german", 3))
    assert found.reason.startswith("only 3 captured requests")


def test_waits_for_the_aim_and_says_how_long() -> None:
    found = refused(captured("german", 200), AT_ONCE)
    assert found.waits_for_traffic
    assert "200 captured requests since the change; waiting for 512" in found.reason
    assert "2026-03-01 15:10:00 UTC" in found.reason


def test_the_aim_ends_the_wait_at_once() -> None:
    assert isinstance(plan(captured("german", 512), CHANGE, RULES, AT_ONCE), Plan)


def test_after_the_wait_the_minimum_suffices() -> None:
    assert isinstance(plan(captured("german", 128), CHANGE, RULES, LATER), Plan)


def test_everything_else_is_replayed_and_nothing_is_on_both_sides() -> None:
    old = captured("german", 100, CHANGED_AT - timedelta(hours=2))
    found = planned(captured("german", 300) + old + captured("code", 200))
    train, replay, held_out = set(found.train), set(found.replay), set(found.held_out)
    assert not train & replay
    assert not (train | replay) & held_out
    assert {found.groups[key] for key in train} == {"changed:german"}
    assert {found.groups[key] for key in replay} == {"older:german", "older:code"}
    assert {found.groups[key] for key in held_out} == {"changed:german", "older:german", "older:code"}
    assert len(held_out) / 600 == pytest.approx(0.2, abs=0.05)


def test_of_much_older_traffic_no_more_is_replayed_than_fits_in_memory_and_rare_segments_in_full() -> None:
    before = CHANGED_AT - timedelta(hours=2)
    sizes = {"code": 4_000, "prose": 4_000, "sql": 2_000, "rare": 50}
    older = [each for name, size in sizes.items() for each in captured(name, size, before)]
    found = planned(captured("german", 300) + older)
    replayed = Counter(found.groups[key] for key in found.replay)
    rare = sum(key.startswith("rare-") for key in (*found.replay, *found.held_out))
    assert rare == 50
    assert replayed["older:code"] == replayed["older:prose"] == replayed["older:sql"] > 1_300
    assert replayed.total() <= 4_096
    newest = [key for key in found.groups if key.startswith("code-") and key not in set(found.held_out)]
    assert [key for key in found.replay if key.startswith("code-")] == newest[: replayed["older:code"]]


@pytest.mark.parametrize(("room", "taken"), [(10**6, None), (100_000, 100_000 // 49)])
def test_for_a_corpus_as_much_older_traffic_is_taken_as_it_has_room_for(room: int, taken: int | None) -> None:
    """Less of it would draft less in the other segments; what is more is held in memory in vain."""
    before = CHANGED_AT - timedelta(hours=2)
    older = [*captured("code", 4_000, before), *captured("prose", 4_000, before)]
    too_long = replace(captured("prose", 1, CHANGED_AT)[0], output_tokens=room)
    rules = replace(RULES, corpus_tokens=room)
    found = plan([*captured("german", 300), *older, too_long], CHANGE, rules, LATER)
    assert isinstance(found, Plan)
    learned = [key for key in found.groups if key != too_long.key and not is_held_out(key, 0.2)]
    learned.sort(key=lambda key: not key.startswith("german"))
    assert [*found.train, *found.replay] == learned[:taken]


@pytest.mark.parametrize("forced", [True, False])
def test_of_more_changed_traffic_than_is_trained_on_each_segment_has_as_many_and_a_rare_one_all_of_its(
    forced: bool,
) -> None:
    """The gate and the watch judge each, and the newest of all would be of the busy ones alone."""
    sizes, at = (
        {"rare": 150, "code": 4_000, "prose": 4_000},
        [CHANGED_AT + timedelta(hours=n) for n in (0, 2, 2)],
    )
    traffic = [
        each
        for (name, size), when in zip(sizes.items(), at, strict=True)
        for each in captured(name, size, when)
    ]
    change = None if forced else Change(dict.fromkeys(sizes, CHANGED_AT), CHANGE.opened_at)
    found = plan(traffic, change, RULES, LATER)
    assert isinstance(found, Plan)
    trained = Counter(found.groups[key] for key in found.train)
    assert trained["changed:rare"] == 150 - sum(key.startswith("rare") for key in found.held_out) > 100
    assert trained["changed:code"] == trained["changed:prose"] > 1_900
    assert trained.total() <= 4_096
    newest = [key for key in found.groups if key.startswith("code") and not is_held_out(key, 0.2)]
    assert [key for key in found.train if key.startswith("code")] == newest[: trained["changed:code"]]


@pytest.mark.parametrize("change", [CHANGE, None])
def test_for_a_corpus_as_much_changed_traffic_is_taken_as_it_has_room_for(change: Change | None) -> None:
    """Not the 4,096 of a training, also where all is changed: what served before may be a larger corpus."""
    changed = captured("german", 9_000)
    older = captured("code", 50, CHANGED_AT - timedelta(hours=2))
    for room, taken, replayed in ((10**6, 9_000, change is not None), (240_000, 240_000 // 49, False)):
        rules = replace(RULES, corpus_tokens=room)
        found = plan([*changed, *older], change, rules, LATER)
        assert isinstance(found, Plan)
        learned = [key for key in found.groups if not is_held_out(key, 0.2)]
        if change is not None:
            learned = [key for key in learned if key.startswith("german")]
        assert list(found.train) == learned[:taken]
        assert bool(found.replay) == replayed


def test_a_corpus_into_which_no_answer_fits_is_not_made_and_the_setting_is_named() -> None:
    found = plan(captured("german", 300), CHANGE, replace(RULES, corpus_tokens=48), LATER)
    assert isinstance(found, NothingToDo)
    assert found.reason.startswith("no captured answer since the change fits into a corpus of 48 tokens")


def test_the_split_of_a_request_never_changes() -> None:
    small = planned(captured("german", 200))
    large = planned(captured("german", 900) + captured("code", 500))
    assert set(small.held_out) <= set(large.held_out)
    assert not set(small.held_out) & set(large.train)
    assert not set(small.train) & set(large.held_out)


def test_a_forced_run_learns_all_captured_traffic() -> None:
    found = planned(captured("german", 100) + captured("code", 100), change=None)
    assert not found.replay
    assert {found.groups[key] for key in found.train} == {"changed:german", "changed:code"}


def test_a_forced_run_without_traffic_does_not_wait() -> None:
    found = plan(captured("code", 5), None, RULES, LATER)
    assert found == NothingToDo("only 5 captured requests, 128 needed", waits_for_traffic=False)


def test_a_gate_without_enough_held_out_requests_is_not_begun() -> None:
    rules = PlanRules(10, 10, timedelta(0), 0.05)
    found = plan(captured("german", 40), CHANGE, rules, LATER)
    assert isinstance(found, NothingToDo)
    assert "held out for the gate" in found.reason


def test_what_is_longer_than_the_context_counts_for_nothing() -> None:
    rules = replace(RULES, context_tokens=64)
    requests = captured("german", 114, CHANGED_AT + timedelta(hours=1), tokens=65) + captured("german", 14)
    assert plan(requests, CHANGE, rules, LATER) == NothingToDo(
        "only 14 captured requests since the change that fit the models' context of 64 tokens, 128 needed",
        waits_for_traffic=True,
    )
    found = plan(requests + captured("german", 300), CHANGE, rules, LATER)
    assert isinstance(found, Plan)
    assert len(found.groups) == 300


@pytest.mark.parametrize(
    ("requests", "told"),
    [(1, "1 captured request is left out: it has"), (2, "2 captured requests are left out: they have")],
)
def test_what_is_left_out_is_told_by_number(requests: int, told: str) -> None:
    lacks = "token ids that the target's vocabulary of 32 lacks"
    assert LeftOut(requests, 32).told == f"{told} {lacks}"

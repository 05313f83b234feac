"""Faults of the engine are named by what only they do, and none of them starts a retraining."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest

from driftguard.diagnosis import (
    Captured,
    Diagnosis,
    EngineChange,
    Evidence,
    Observed,
    ProbeResult,
    diagnose,
    server_age,
)
from tests.diagnosis.cases import CODE, GERMAN, LEGAL, captures, probes
from tests.diagnosis.served import HOUR, SEGMENTS, served

BEFORE = served(1, 600)
STEADY: dict[str, Any] = {"probes_before": probes() * 2, "probes_after": probes()}


def diagnosed(after: Any, before: Any = BEFORE, **more: Any) -> Diagnosis:
    found = diagnose(Evidence("down", more.pop("changed", SEGMENTS), before, after, **more))
    assert not (found.retrain and found.cause not in ("query_drift", "target_replaced"))
    return found


def verdict(found: Diagnosis) -> tuple[str, str, bool]:
    return found.cause, found.confidence, found.retrain


def cache_fault(segment: str, prompt: int, cached: float, age: float) -> float:
    return 0.3 if cached > 0.5 else 0.7


def length_fault(segment: str, prompt: int, cached: float, age: float) -> float:
    return 0.3 if prompt > 2_500 else 0.7


@pytest.mark.parametrize("seed", range(2))
def test_what_falls_only_with_the_cached_share_is_the_cache_and_steady_cold_probes_do_not_hide_it(
    seed: int,
) -> None:
    found = diagnosed(served(seed + 10, 150, cache_fault, hours=(0.0, 6.0)), **STEADY)
    assert (found.cause, found.retrain) == ("cache", False)
    assert "prefix cache" in found.reason
    assert "--no-enable-prefix-caching" in found.confirmed_by


@pytest.mark.parametrize("seed", range(2))
def test_what_falls_only_at_long_prompts_is_the_context_length(seed: int) -> None:
    found = diagnosed(served(seed + 20, 150, length_fault, hours=(0.0, 6.0)))
    assert (found.cause, found.retrain) == ("cache", False)
    assert "the length of the prompt" in found.reason


def test_a_fall_of_all_lengths_alike_is_no_cache() -> None:
    found = diagnosed(served(30, 150, lambda *_: 0.4, hours=(0.0, 6.0)))
    assert verdict(found) == ("unknown", "low", False)


def test_new_requests_that_are_longer_than_before_are_not_taken_for_a_fault_at_long_prompts() -> None:
    old = served(31, 70, hours=(0.0, 6.0), lengths=(50, 1_000))
    new = served(32, 80, lambda *_: 0.3, hours=(0.0, 6.0), lengths=(3_000, 9_000))
    found = diagnosed(old + new, before=served(33, 600, lengths=(50, 4_000)))
    assert found.cause != "cache"


def test_probes_as_long_as_the_requests_that_fell_and_steady_leave_only_the_traffic() -> None:
    long = {
        name: tuple(replace(one, prompt_tokens=3_900, cached_tokens=3_300) for one in side)
        for name, side in STEADY.items()
    }
    found = diagnosed(served(34, 200, lambda *_: 0.45, hours=(0.0, 6.0)), **long)
    assert verdict(found) == ("query_drift", "medium", True)


def test_steady_probes_that_are_shorter_than_the_requests_that_fell_do_not_retrain() -> None:
    """So few requests that the fall with the length is not shown, and only the long ones fell."""
    short = {name: tuple(replace(one, prompt_tokens=60) for one in side) for name, side in STEADY.items()}
    found = diagnosed(served(35, 36, length_fault, hours=(0.0, 1.0)), **short)
    assert not found.retrain
    assert any("do not speak for" in gap for gap in found.missing) or found.cause == "cache"


def warm(side: tuple[ProbeResult, ...]) -> tuple[ProbeResult, ...]:
    return tuple(replace(one, is_warm=True, prompt_tokens=3_900, cached_tokens=3_880) for one in side)


def test_probes_that_fall_only_when_asked_again_from_the_prefix_cache_are_the_cache() -> None:
    cold = tuple(replace(one, prompt_tokens=3_900, cached_tokens=0) for one in probes() * 2)
    found = diagnosed(
        served(36, 60, lambda *_: 0.45, hours=(0.0, 2.0)),
        probes_before=cold + warm(cold),
        probes_after=cold[:20] + warm(probes(-0.2)),
    )
    assert verdict(found) == ("cache", "high", False)
    assert any("asked again from the prefix cache, moved" in one.text for one in found.facts)


def test_probes_that_are_steady_from_the_prefix_cache_too_leave_only_the_traffic() -> None:
    """Without the second question they would not speak for the cached requests, which fell most."""
    cold = tuple(replace(one, prompt_tokens=3_900, cached_tokens=0) for one in probes() * 2)
    after = served(37, 60, cache_fault, hours=(0.0, 2.0))
    once = diagnosed(after, probes_before=cold, probes_after=cold[:20])
    assert not once.retrain
    twice = diagnosed(after, probes_before=cold + warm(cold), probes_after=cold[:20] + warm(cold[:20]))
    assert verdict(twice) == ("query_drift", "medium", True)


def aged(hours: float) -> float:
    return 0.7 - 0.06 * min(max(hours - 3.0, 0.0), 7.0)


@pytest.mark.parametrize("seed", range(2))
def test_what_falls_with_the_age_of_the_server_and_comes_back_with_a_restart_is_the_engine(seed: int) -> None:
    starts = (-40.0, -24.0, -8.0)
    shape = {"starts": starts, "rate": lambda *told: aged(told[3])}
    before = served(seed + 40, 500, hours=(-23.0, 0.0), **shape)  # type: ignore[arg-type]
    found = diagnosed(served(seed + 50, 150, hours=(0.0, 4.0), **shape), before)  # type: ignore[arg-type]
    assert verdict(found) == ("engine_state", "medium", False)
    assert "restart" in found.reason
    assert any("after a restart" in one.text for one in found.facts)


def test_a_fall_between_two_restarts_that_neither_brings_nor_takes_is_no_matter_of_age() -> None:
    starts = (-40.0, -24.0, -8.0, 2.0)
    found = diagnosed(
        served(60, 200, lambda *_: 0.4, hours=(0.0, 6.0), starts=starts),
        served(61, 500, hours=(-23.0, 0.0), starts=starts),
    )
    assert found.cause == "unknown"


def test_probes_that_fall_with_the_age_too_show_it_within_one_run() -> None:
    def replayed(at: float, shift: float) -> list[ProbeResult]:
        return [replace(one, ended_at=at * HOUR, server_started_at=-30 * HOUR) for one in probes(shift)]

    before = [one for n in range(9) for one in replayed(-27.0 + 3 * n, -0.012 * n)]
    found = diagnosed(
        served(62, 200, lambda *_: 0.45, hours=(0.0, 6.0), starts=(-30.0,)),
        served(63, 500, hours=(-20.0, 0.0), starts=(-30.0,)),
        probes_before=tuple(before),
        probes_after=tuple(replayed(5.0, -0.25)),
    )
    assert verdict(found) == ("engine_state", "medium", False)


def test_position_one_gone_in_every_segment_is_another_draft_even_without_probes() -> None:
    found = diagnosed(served(70, 120, lambda *_: 0.04, hours=(0.0, 6.0)))
    assert verdict(found) == ("draft_wrong", "medium", False)
    assert "every segment" in found.reason
    assert "sha256sum" in found.confirmed_by


def test_position_one_gone_in_one_segment_is_not() -> None:
    def rate(segment: str, *_: float) -> float:
        return 0.04 if segment == "german" else 0.7

    found = diagnosed(served(71, 150, rate, hours=(0.0, 6.0)), changed=("german",))
    assert verdict(found) == ("unknown", "low", False)


def test_probes_and_position_one_of_all_segments_fell_a_little_is_a_quantised_or_other_draft() -> None:
    firsts = {
        name: tuple(replace(one, first_drafted=50, first_accepted=35 - fall) for one in side)
        for name, side, fall in (
            ("probes_before", probes() * 2, 0),
            ("probes_after", probes(-0.15), 8),
        )
    }
    found = diagnosed(served(72, 250, lambda *_: 0.55, hours=(0.0, 6.0)), **firsts)
    assert verdict(found) == ("draft_wrong", "medium", False)


def test_probes_fell_and_position_one_did_not_is_the_machine() -> None:
    after = served(73, 250, lambda *_: 0.5, hours=(0.0, 6.0), first=lambda _: 0.7)
    found = diagnosed(after, probes_before=probes() * 2, probes_after=probes(-0.2))
    assert verdict(found) == ("machine", "high", False)


def test_probes_of_another_length_are_another_template() -> None:
    before = tuple(replace(one, prompt_tokens=100) for one in probes() * 2)
    after = tuple(replace(one, prompt_tokens=97) for one in probes(-0.1, answers="other"))
    found = diagnosed(
        served(74, 200, lambda *_: 0.6, hours=(0.0, 6.0)), probes_before=before, probes_after=after
    )
    assert verdict(found) == ("template", "high", False)
    assert "other lengths" in next(one.text for one in found.facts if one.about == "probes")


def test_marks_that_vanish_from_the_prompts_of_every_segment_are_the_template() -> None:
    def marked(side: tuple[Captured, ...], mark: int) -> tuple[Captured, ...]:
        return tuple(replace(one, prompt=(mark, *one.prompt)) for one in side)

    old = captures(1, "code", 60, CODE) + captures(2, "german", 60, GERMAN)
    new = captures(3, "code", 60, CODE) + captures(4, "german", 60, GERMAN)
    after = served(75, 200, lambda *_: 0.55, hours=(0.0, 6.0))
    found = diagnosed(after, captures_before=marked(old, 9_001), captures_after=new)
    assert verdict(found) == ("template", "medium", False)
    found = diagnosed(after, captures_before=marked(old, 9_001), captures_after=marked(new, 9_001))
    assert found.cause == "unknown"


def test_a_new_topic_in_one_segment_is_no_template() -> None:
    old = captures(1, "code", 60, CODE) + captures(2, "german", 60, GERMAN)
    new = captures(3, "code", 60, CODE) + captures(4, "german", 60, LEGAL)
    after = served(76, 200, lambda *_: 0.55, hours=(0.0, 6.0))
    found = diagnosed(after, captures_before=old, captures_after=new)
    assert verdict(found) == ("query_drift", "medium", True)


@pytest.mark.parametrize("seed", range(3))
def test_slower_steps_while_as_many_tokens_are_accepted_are_the_load(seed: int) -> None:
    after = served(seed + 80, 300, step_seconds=0.03, concurrency=(30, 60), hours=(0.0, 6.0))
    found = diagnosed(after)
    assert (found.cause, found.retrain) == ("load", False)
    assert "3.0 times as long" in found.reason


def queued(side: tuple[Observed, ...], waiting: int) -> tuple[Observed, ...]:
    """Where the number of running requests is at its limit, only the queue tells more load."""
    return tuple(
        replace(one, concurrency=None, waiting_requests=waiting + number % 3)
        for number, one in enumerate(side)
    )


def test_a_queue_that_grew_tells_the_load_where_no_more_requests_can_run() -> None:
    before, after = (
        queued(served(86, 1_500, hours=(-20.0, 0.0)), 0),
        queued(served(87, 1_500, step_seconds=0.03, hours=(0.0, 9.0)), 12),
    )
    found = diagnosed(after, before=before)
    assert verdict(found) == ("load", "high", False)
    assert any("more requests wait in the queue" in fact.text for fact in found.facts)
    assert diagnosed(queued(after, 0), before=before).confidence == "medium"


def test_slower_steps_beside_a_fall_of_acceptance_are_not_the_load_alone() -> None:
    after = served(83, 300, lambda *_: 0.5, step_seconds=0.03, hours=(0.0, 6.0))
    assert diagnosed(after).cause != "load"


def test_that_acceptance_did_not_move_is_said_only_where_the_interval_says_so() -> None:
    few = diagnosed(served(84, 40, step_seconds=0.03, concurrency=(30, 60), hours=(0.0, 1.0)))
    many = diagnosed(served(85, 1_500, step_seconds=0.03, concurrency=(30, 60), hours=(0.0, 9.0)))
    assert "did not move" not in few.reason
    assert "no move of acceptance is shown" in few.reason
    assert "acceptance did not move" in many.reason


def looks_and_counts(side: tuple[Captured, ...], rate: float) -> tuple[Captured, ...]:
    return tuple(replace(one, drafted=200, accepted=round(200 * rate) + n % 7) for n, one in enumerate(side))


def test_captured_requests_like_those_before_that_fell_too_are_never_query_drift() -> None:
    """The queries moved as well: half of them are new, and both kinds are accepted less."""
    old = looks_and_counts(captures(1, "german", 100, GERMAN), 0.7)
    same = looks_and_counts(captures(3, "german", 40, GERMAN), 0.45)
    new = looks_and_counts(captures(4, "german", 40, LEGAL), 0.45)
    after = served(86, 200, lambda *_: 0.45, hours=(0.0, 6.0))
    found = diagnosed(after, captures_before=old, captures_after=same + new, changed=("german",))
    assert verdict(found) == ("machine", "medium", False)
    steady = diagnosed(after, captures_before=old, captures_after=same + new, changed=("german",), **STEADY)
    assert verdict(steady) == ("unknown", "low", False)


def test_captured_requests_like_those_before_that_kept_their_level_leave_the_new_ones() -> None:
    old = looks_and_counts(captures(1, "german", 100, GERMAN), 0.7)
    same = looks_and_counts(captures(3, "german", 40, GERMAN), 0.7)
    new = looks_and_counts(captures(4, "german", 40, LEGAL), 0.3)
    after = served(87, 200, lambda *_: 0.5, hours=(0.0, 6.0))
    found = diagnosed(after, captures_before=old, captures_after=same + new, changed=("german",), **STEADY)
    assert verdict(found) == ("query_drift", "high", True)


def test_queries_are_said_to_look_as_before_only_where_a_move_would_have_been_seen() -> None:
    after = served(117, 300, lambda *_: 0.45, hours=(0.0, 6.0))

    def found(conversations: int, other: tuple[int, int] = CODE) -> Diagnosis:
        """60 requests of German a side, in so many sessions, beside another segment before."""
        sides = [
            tuple(
                replace(one, session=f"{seed}-{number % conversations}")
                for number, one in enumerate(captures(seed, "german", 60, GERMAN))
            )
            for seed in (1, 2)
        ]
        code = captures(3, "code", 50, other)
        return diagnosed(
            after, captures_before=sides[0] + code, captures_after=sides[1], changed=("german",), **STEADY
        )

    assert verdict(found(60)) == ("unknown", "low", False)
    assert "neither the queries nor the canary probes moved" in found(60).reason
    assert verdict(found(3)) == ("query_drift", "medium", True)  # the steady probes alone speak
    assert "could not be compared" in found(3).reason
    # The other segment asks the same: a move to it cannot be seen, and nothing shows that there was none.
    assert verdict(found(60, other=GERMAN)) == ("query_drift", "medium", True)


def talk(random: np.random.Generator, name: str) -> list[Captured]:
    """A conversation of eight turns with words of its own: each prompt begins with the whole one before."""
    words = random.integers(0, 5_000, 40)
    whole = tuple(random.choice(words, 160).tolist())
    return [Captured(f"{name}-{turn}", "german", whole[: 20 * (turn + 1)]) for turn in range(8)]


def test_long_conversations_of_a_few_users_are_no_move_of_the_queries() -> None:
    """96 requests a side, which are twelve conversations; compared as requests, 20 of 20 would move."""
    moved = 0
    for seed in range(20):
        random = np.random.default_rng([7, seed])
        sides = [[one for n in range(12) for one in talk(random, f"{side}-{n}")] for side in (0, 1)]
        found = diagnosed(
            served(90 + seed, 100, lambda *_: 0.5, hours=(0.0, 6.0)),
            captures_before=tuple(sides[0]),
            captures_after=tuple(sides[1]),
            changed=("german",),
        )
        moved += found.cause == "query_drift"
    assert moved <= 2


def test_a_sudden_fall_within_one_run_of_the_server_is_no_matter_of_its_age() -> None:
    starts = (-30.0,)
    after = served(110, 200, lambda *_: 0.4, hours=(0.0, 8.0), starts=starts)
    found = server_age.compare(served(111, 500, starts=starts), after, ())
    assert found is not None
    assert not found.falls_with_age(-0.3)


def test_traffic_that_moves_slowly_within_one_run_is_not_blamed_on_the_engine_without_probes_or_a_cure() -> (
    None
):
    """From two hours after the start on; the run before it was good until its end."""
    shape: dict[str, Any] = {"starts": (-40.0, -12.0), "rate": lambda *told: min(0.7, 0.76 - 0.03 * told[3])}
    good = served(112, 300, hours=(-39.0, -12.1), starts=(-40.0,))
    falling = served(113, 300, hours=(-12.0, 0.0), **shape)
    after = served(114, 200, hours=(0.0, 4.0), **shape)
    found = server_age.compare([*good, *falling], after, ())
    assert found is not None
    assert found.falls_with_age(-0.2)
    assert diagnosed(after, (*good, *falling)).cause == "unknown"


def test_marks_of_one_segment_alone_may_be_its_new_topic() -> None:
    old = tuple(replace(one, prompt=(9_001, *one.prompt)) for one in captures(2, "german", 60, GERMAN))
    new = captures(4, "german", 60, LEGAL)
    after = served(115, 200, lambda *_: 0.5, hours=(0.0, 6.0))
    found = diagnosed(after, captures_before=old, captures_after=new, changed=("german",))
    assert verdict(found) == ("query_drift", "medium", True)


def test_a_cache_is_named_although_the_queries_moved_where_those_like_before_fell_too() -> None:
    old = looks_and_counts(captures(1, "german", 100, GERMAN), 0.7)
    same = looks_and_counts(captures(3, "german", 40, GERMAN), 0.45)
    new = looks_and_counts(captures(4, "german", 40, LEGAL), 0.45)
    after = served(116, 200, cache_fault, hours=(0.0, 6.0))
    found = diagnosed(after, captures_before=old, captures_after=same + new, changed=("german",))
    assert (found.cause, found.retrain) == ("cache", False)
    kept = looks_and_counts(captures(3, "german", 40, GERMAN), 0.7)
    assert diagnosed(after, captures_before=old, captures_after=kept + new, changed=("german",)).retrain


UPGRADE = EngineChange("vLLM 0.31.0", "vLLM 0.32.0", datetime(2026, 11, 1, 14, 3, tzinfo=UTC), 240.0)
TOLD = "vLLM 0.31.0 became vLLM 0.32.0 at 14:03 UTC, 4 minutes before the change"
OLD_TOPIC = captures(1, "code", 60, CODE) + captures(2, "german", 60, GERMAN)
SAME_TOPIC = captures(3, "code", 60, CODE) + captures(4, "german", 60, GERMAN)
NEW_TOPIC = captures(5, "code", 60, CODE) + captures(6, "german", 60, LEGAL)


@pytest.mark.parametrize(
    ("evidence", "without", "beside_an_upgrade"),
    [
        ({}, ("unknown", "low", False), ("configuration", "low", False)),
        (
            {"captures_before": OLD_TOPIC, "captures_after": SAME_TOPIC},
            ("unknown", "low", False),
            ("configuration", "medium", False),
        ),
        (  # what fell with the upgrade may be neither the topic's doing
            {"captures_before": OLD_TOPIC, "captures_after": NEW_TOPIC},
            ("query_drift", "medium", True),
            ("query_drift", "low", False),
        ),
        (  # steady probes exclude the engine, whatever its version
            {"captures_before": OLD_TOPIC, "captures_after": NEW_TOPIC, **STEADY},
            ("query_drift", "high", True),
            ("query_drift", "high", True),
        ),
        (
            {"probes_before": probes() * 2, "probes_after": probes(-0.25)},
            ("machine", "high", False),
            ("machine", "high", False),
        ),
    ],
)
def test_another_version_of_the_engine_at_the_time_of_the_fall_is_named_and_never_retrained_for(
    evidence: dict[str, Any], without: tuple[str, str, bool], beside_an_upgrade: tuple[str, str, bool]
) -> None:
    after = served(90, 200, lambda *_: 0.45, hours=(0.0, 6.0))
    assert verdict(diagnosed(after, **evidence)) == without
    found = diagnosed(after, engine_change=UPGRADE, **evidence)
    assert verdict(found) == beside_an_upgrade
    assert [fact.text for fact in found.facts if fact.about == "engine"] == [TOLD]
    if found.confidence != "high" or found.cause == "machine":
        assert TOLD in found.reason

"""An open incident hides nothing: other segments are watched meanwhile, and join it when they change."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from driftguard.detection import (
    BaselineReady,
    DetectorConfig,
    DriftClosed,
    DriftOpened,
    DriftWidened,
    Finding,
    ObservationBatch,
    StreamState,
    accept_new_normal,
    describe,
    fold,
    leave_incident,
)
from driftguard.detection.state.codec import decode_state, encode_state
from tests.detection.traffic import fold_all, requests

NAMES = ["chat", "german", "rare"]
SHARES = [0.6, 0.3, 0.1]
MEANS = np.array([0.7, 0.65, 0.6])
CONFIG = DetectorConfig()
LEARNED = 6_000  # requests: all segments are watched


def traffic(seed: int, *parts: tuple[dict[str, float], int]) -> ObservationBatch:
    """Parts of so many requests each, whose segments accept less by what is given."""
    rng = np.random.default_rng(seed)
    code = rng.choice(len(NAMES), sum(n for _, n in parts), p=SHARES)
    lost = np.concatenate([np.tile([falls.get(name, 0.0) for name in NAMES], (n, 1)) for falls, n in parts])
    means: NDArray[np.float64] = MEANS[code] - lost[np.arange(len(code)), code]
    return requests(rng, means, [NAMES[each] for each in code])


def widened(findings: list[Finding]) -> list[DriftWidened]:
    return [finding for finding in findings if isinstance(finding, DriftWidened)]


@pytest.mark.slow
@pytest.mark.parametrize("other", ["german", "rare"])
def test_a_segment_that_falls_while_another_is_down_joins_its_incident(other: str) -> None:
    found = 0
    for seed in range(20):
        batch = traffic(seed, ({}, LEARNED), ({"chat": 0.2}, 600), ({"chat": 0.2, other: 0.2}, 2_000))
        state, findings = fold_all(batch, CONFIG)
        down = [finding for finding in findings if isinstance(finding, DriftOpened)]
        assert [change.segment for change in down[0].segments] == ["chat"]
        segments = {segment.segment: segment.verdict for segment in describe(CONFIG, state).segments}
        joined = widened(findings)
        if not joined:
            continue
        found += 1
        assert [change.segment for change in joined[0].segments] == [other]
        assert joined[0].change_point > LEARNED + 500
        (change,) = joined[0].segments
        assert change.before.rate - change.after.rate > 0.1
        assert {name for name, verdict in segments.items() if verdict == "degraded"} == {"chat", other}
    print(f"seeds 0..19: {found} of 20 found")
    assert found == 20


def test_it_is_over_in_each_segment_that_comes_back_and_then_in_all() -> None:
    both = {"chat": 0.2, "german": 0.2}
    batch = traffic(
        3, ({}, LEARNED), ({"chat": 0.2}, 600), (both, 800), ({"german": 0.2}, 2_000), ({}, 1_000)
    )
    state, findings = fold_all(batch, CONFIG)
    (opened,) = [finding for finding in findings if isinstance(finding, DriftOpened)]
    (joined,) = widened(findings)
    chat, german = [finding for finding in findings if isinstance(finding, DriftClosed)]
    assert opened.ordinal < joined.ordinal < chat.ordinal < german.ordinal
    assert LEARNED + 600 + 800 < chat.ordinal < LEARNED + 600 + 800 + 2_000 < german.ordinal
    assert [[change.segment for change in each.segments] for each in (chat, german)] == [["chat"], ["german"]]
    assert (chat.left, german.left) == (("german",), ())
    assert {each.opened_ordinal for each in (chat, german)} == {opened.ordinal}
    assert {each.reason for each in (chat, german)} == {"recovered"}
    assert state.incidents == (None, None)


def test_a_segment_that_is_back_is_watched_again_while_another_is_not() -> None:
    low, rare = {"chat": 0.15, "rare": 0.15}, {"rare": 0.15}
    found = []
    for seed in range(10):
        batch = traffic(seed, ({}, LEARNED), (low, 2_000), (rare, 1_000), (low, 2_000), (rare, 1_000))
        state, findings = fold_all(batch, CONFIG)
        again = [each for each in widened(findings) if each.ordinal > LEARNED + 3_000]
        if not again:
            continue
        found.append(again[0].ordinal - LEARNED - 3_000)
        assert [change.segment for change in again[0].segments] == ["chat"]
        assert again[0].change_point == pytest.approx(LEARNED + 3_000, abs=60)
        (change,) = again[0].segments
        assert change.before.rate - change.after.rate == pytest.approx(0.15, abs=0.06)
        over = [each for each in findings if isinstance(each, DriftClosed)]
        assert ["chat" in {change.segment for change in each.segments} for each in over] == [True, True]
        degraded = [each.segment for each in describe(CONFIG, state).segments if each.verdict == "degraded"]
        assert degraded == ["rare"]
    print(f"seeds 0..9: found after {found} requests")
    assert len(found) == 10
    assert max(found) < 200


def of_nights(seed: int, *, german_after: float) -> ObservationBatch:
    """Chat falls and stays fallen; german falls after it, sends nothing for longer than SHORT.history, and is
    at this level then."""
    rng = np.random.default_rng(seed)
    learned, fallen, silent, again = 4_000, 400, 2_500, 2_500
    german = rng.random(learned + 2 * fallen + silent + again) < 0.3
    when = np.arange(len(german)) - learned
    german[(when >= 2 * fallen) & (when < 2 * fallen + silent)] = False
    means = np.where(when < german * fallen, 0.7, 0.5)
    means[german & (when >= 2 * fallen)] = german_after
    return requests(rng, means, ["german" if each else "chat" for each in german])


SHORT = DetectorConfig(history=1_000)


def test_a_segment_that_sends_again_after_a_silence_is_tested_again_while_another_is_not_back() -> None:
    for seed in range(5):
        state, findings = fold_all(of_nights(seed, german_after=0.7), SHORT)
        over = [each for each in findings if isinstance(each, DriftClosed)]
        assert [[change.segment for change in each.segments] for each in over] == [["german"]], seed
        assert [(each.reason, each.left) for each in over] == [("recovered", ("chat",))]
        assert not widened(findings[findings.index(over[0]) :])
        degraded = [each.segment for each in describe(SHORT, state).segments if each.verdict == "degraded"]
        assert degraded == ["chat"]


def test_a_segment_that_is_still_fallen_after_a_silence_stays_in_the_incident() -> None:
    state, findings = fold_all(of_nights(8, german_after=0.5), SHORT)
    assert not [each for each in findings if isinstance(each, DriftClosed)]
    assert state.incidents[0] is not None
    assert set(state.incidents[0].names(state)) == {"chat", "german"}


def test_a_silence_in_an_incident_does_not_depend_on_how_observations_are_batched() -> None:
    batch = of_nights(9, german_after=0.7)
    whole, findings = fold(SHORT, StreamState(), batch)
    cuts = np.random.default_rng(10).choice(np.arange(1, len(batch)), 300, replace=False)
    state, found = StreamState(), []
    for start, stop in pairwise([0, *sorted(cuts.tolist()), len(batch)]):
        state, more = fold(SHORT, decode_state(encode_state(state)), batch[start:stop])
        found += more
    assert found == findings
    assert encode_state(state) == encode_state(whole)


def test_what_is_left_silent_as_the_last_other_leaves_is_over_with_the_next_request() -> None:
    batch = of_nights(8, german_after=0.5)
    asleep, _ = fold(SHORT, StreamState(), batch[:7_200])
    state, findings = fold(SHORT, leave_incident(asleep, "down", ["chat"]), batch[7_200:7_300])
    over, *found = findings
    assert isinstance(over, DriftClosed)
    assert (over.reason, over.left) == ("no_traffic", ())
    assert over.ordinal == batch.ordinal[7_200]
    assert [type(each) for each in found] == [DriftOpened]  # of chat, which is still fallen
    assert state.incidents[0] is not None


def fallen_together(seed: int, still: dict[str, float]) -> ObservationBatch:
    """Chat and german fall at once, and later lose this."""
    return traffic(seed, ({}, LEARNED), ({"chat": 0.2, "german": 0.2}, 400), (still, 4_000))


def since_learned(findings: list[Finding]) -> tuple[DriftOpened, list[DriftClosed]]:
    (opened,) = [each for each in findings if isinstance(each, DriftOpened) and each.ordinal > LEARNED]
    return opened, [each for each in findings if isinstance(each, DriftClosed) and each.ordinal > LEARNED]


@pytest.mark.parametrize(("back", "fallen"), [("chat", "german"), ("german", "chat")])
def test_of_segments_that_fell_together_the_one_that_is_back_leaves_and_the_other_stays(
    back: str, fallen: str
) -> None:
    found, scopes = [], []
    for seed in range(10):
        state, findings = fold_all(fallen_together(seed, {fallen: 0.2}), CONFIG)
        opened, over = since_learned(findings)
        assert [{change.segment for change in each.segments} & {back, fallen} for each in over] == [{back}]
        assert fallen in over[0].left
        assert state.incidents[0] is not None
        assert fallen in state.incidents[0].names(state)
        scopes.append(opened.scope)
        found.append(over[0].ordinal - LEARNED - 400)
    print(f"seeds 0..9: back after {found} requests, {scopes}")
    assert scopes.count("stream") >= 5
    assert max(found) < 1_500


def many_fallen_together(seed: int, *, hotter: str | None = None) -> ObservationBatch:
    """A dozen segments fall a little at once, and all are back but s00. `hotter`: requests of this one have
    another temperature from some time after the fall on."""
    rng = np.random.default_rng(seed)
    names = np.array([f"s{each:02}" for each in range(12)])[rng.integers(0, 12, 15_500)]
    when = np.arange(len(names)) - 12_000
    means = np.where((when >= 0) & ((when < 500) | (names == "s00")), 0.58, 0.7)
    batch = requests(rng, means, names.tolist())
    return replace(batch, temperature=np.where((when >= 300) & (names == hotter), 1.0, 0.0))


def test_what_all_that_fell_together_show_to_be_back_is_told_as_back_while_one_stays() -> None:
    told = []
    for seed in range(4):
        state, findings = fold_all(many_fallen_together(seed), CONFIG)
        over = [each for each in findings if isinstance(each, DriftClosed) and each.ordinal > 12_000]
        told.append(max(len(each.segments) for each in over))
        assert {each.reason for each in over} == {"recovered"}, seed
        assert all(change.segment != "s00" for each in over for change in each.segments)
        assert state.recoveries.sum() == sum(len(each.segments) for each in over)
    print(f"seeds 0..3: at most {told} segments back at once")
    assert max(told) > 5


def test_what_the_others_show_says_nothing_of_a_segment_with_other_settings_since() -> None:
    stays = 0
    for seed in range(4):
        state, findings = fold_all(many_fallen_together(seed, hotter="s00"), CONFIG)
        opened = next(each for each in findings if isinstance(each, DriftOpened) and each.ordinal > 12_000)
        if opened.scope == "stream" and "s00" in {change.segment for change in opened.segments}:
            stays += 1
            assert state.incidents[0] is not None, seed
            assert state.incidents[0].names(state) == ("s00",), seed
    print(f"seeds 0..3: in {stays}")
    assert stays >= 2


def test_segments_that_fell_together_and_are_back_together_leave_together() -> None:
    """Also the rare one, which by itself tells it much later."""
    together = []
    for seed in range(8):
        batch = traffic(seed, ({}, LEARNED), (dict.fromkeys(NAMES, 0.2), 400), ({}, 600))
        state, findings = fold_all(batch, CONFIG)
        opened, over = since_learned(findings)
        if opened.scope == "stream" and len(opened.segments) == len(NAMES):
            together.append(seed)
            assert [{change.segment for change in each.segments} for each in over] == [set(NAMES)]
            assert state.incidents[0] is None
    print(f"seeds 0..7: fallen together in {together}")
    assert len(together) >= 3


@pytest.mark.slow
def test_an_unchanged_segment_joins_no_incident() -> None:
    joined = 0
    for seed in range(10):
        batch = traffic(seed, ({}, LEARNED), ({"chat": 0.2}, 20_000))
        joined += len(widened(fold_all(batch, CONFIG)[1]))
    print(f"seeds 0..9: {joined} joined in 200,000 requests")
    assert joined <= 1


def test_a_state_does_not_depend_on_how_observations_are_batched() -> None:
    both = {"chat": 0.2, "german": 0.2}
    batch = traffic(
        4, ({}, LEARNED), ({"chat": 0.2}, 600), (both, 800), ({"german": 0.2}, 600), (both, 400), ({}, 800)
    )
    whole, findings = fold(CONFIG, StreamState(), batch)
    assert len(widened(findings)) == 2
    cuts = np.random.default_rng(5).choice(np.arange(1, len(batch)), 300, replace=False)
    state = StreamState()
    for start, stop in pairwise([0, *sorted(cuts.tolist()), len(batch)]):
        state, _ = fold(CONFIG, decode_state(encode_state(state)), batch[start:stop])
    assert encode_state(state) == encode_state(whole)


def test_of_a_segment_that_joined_the_level_counts_since_its_own_change() -> None:
    """Also where an operator accepts it: its baseline is learned from that level alone."""
    both = {"chat": 0.2, "german": 0.2}
    state, findings = fold_all(traffic(6, ({}, LEARNED), ({"chat": 0.2}, 1_500), (both, 400)), CONFIG)
    (joined,) = widened(findings)
    assert [change.segment for change in joined.segments] == ["german"]
    (german,) = [segment for segment in describe(CONFIG, state).segments if segment.segment == "german"]
    assert german.recent is not None
    assert german.recent.rate == pytest.approx(0.45, abs=0.03)

    more = traffic(7, (both, 3_000))
    more = replace(more, ordinal=more.ordinal + LEARNED + 1_900, ended_at=more.ended_at + LEARNED + 1_900.0)
    _, findings = fold(CONFIG, accept_new_normal(state, "down"), more)
    levels = {each.segment: each.mean_per_request for each in findings if isinstance(each, BaselineReady)}
    assert levels["chat"] == pytest.approx(0.5, abs=0.03)
    assert levels["german"] == pytest.approx(0.45, abs=0.03)
    assert not [each for each in findings if isinstance(each, DriftOpened)]

"""Where K varies a record is judged by its first position: K moves nothing then, and a worse draft does."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from driftguard.detection import (
    BaselineReady,
    DetectorConfig,
    DriftOpened,
    Finding,
    ObservationBatch,
    StreamState,
    describe,
    fold,
    fold_many,
)
from driftguard.detection.state.codec import decode_state, encode_state
from driftguard.detection.statistics.strata import KINDS, Setting, settings_of, unpack, without_configuration
from driftguard.records import AcceptanceRecord
from tests.detection.varying_k import at_k, following, with_k, without_positions

CONFIG = DetectorConfig(minimum_drop=0.1)
WALK = np.repeat([3, 5, 2, 6, 4, 6, 3, 1, 5, 4], 250)  # as the load of a server moves it
AS_BEFORE, AFTER = 1_200, 400


def observed(records: list[AcceptanceRecord]) -> ObservationBatch:
    return ObservationBatch.from_records(range(1, len(records) + 1), records)


def found(records: list[AcceptanceRecord]) -> tuple[StreamState, list[Finding]]:
    return fold(CONFIG, StreamState(), observed(records))


def opened(records: list[AcceptanceRecord]) -> list[DriftOpened]:
    return [finding for finding in found(records)[1] if isinstance(finding, DriftOpened)]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_k_that_moves_is_no_drift_where_all_positions_would_say_so(seed: int) -> None:
    records = at_k(seed, np.full(len(WALK), 0.7), WALK)
    state, _ = found(without_positions(records))
    assert state.inflation.max() > 4.0  # over all positions the moves of K pass for traffic that wanders
    state, findings = found(records)
    assert state.inflation.max() < 4.0
    assert [finding for finding in findings if isinstance(finding, DriftOpened)] == []


def test_a_worse_draft_is_found_while_k_moves() -> None:
    k = np.random.default_rng(0).permutation(WALK)[: AS_BEFORE + AFTER]
    quality = np.repeat([0.7, 0.55], [AS_BEFORE, AFTER])
    (alarm,) = opened(at_k(4, quality, k))
    assert alarm.direction == "down"
    assert AS_BEFORE <= alarm.ordinal <= AS_BEFORE + 150
    assert alarm.interval[0] <= AS_BEFORE + 1 <= alarm.interval[1]
    (segment,) = alarm.segments
    assert [side.positions for side in (segment.before, segment.after, alarm.before, alarm.after)] == [
        "first"
    ] * 4
    assert segment.before.rate == pytest.approx(0.7, abs=0.02)
    assert segment.after.low <= 0.55 <= segment.after.high


@pytest.mark.parametrize("seed", [5, 7])
def test_a_draft_that_gets_worse_is_found_sooner_where_k_falls_with_it_and_hides_it(seed: int) -> None:
    quality = np.concatenate([np.full(AS_BEFORE, 0.8), np.linspace(0.8, 0.6, 500)])
    records, k = following(seed, quality)
    assert np.median(k[:AS_BEFORE]) - np.median(k[-100:]) >= 2
    by_first, by_all = opened(records), opened(without_positions(records))
    assert [alarm.direction for alarm in by_first] == ["down"]
    assert all(alarm.ordinal > by_first[0].ordinal + 100 for alarm in by_all)


def test_at_a_known_k_all_positions_are_judged_whatever_else_is_given() -> None:
    records = at_k(7, np.full(1_200, 0.7), np.full(1_200, 4))
    given, left_out = with_k(records, 4), with_k(without_positions(records), 4)
    assert encode_state(found(given)[0]) == encode_state(found(left_out)[0])
    ready = [finding for finding in found(given)[1] if isinstance(finding, BaselineReady)]
    assert [finding.acceptance.positions for finding in ready] == ["all"]


def test_no_baseline_is_of_both_kinds_and_a_new_one_says_why() -> None:
    fixed = with_k(at_k(8, np.full(900, 0.7), np.full(900, 4)), 4)
    varied = at_k(9, np.full(900, 0.7), WALK[:900], first=900)
    unknown = without_positions(at_k(10, np.full(900, 0.7), np.full(900, 4), first=1_800))
    state, findings = found([*fixed, *varied, *unknown])
    ready = [finding for finding in findings if isinstance(finding, BaselineReady)]
    assert [finding.acceptance.positions for finding in ready] == ["all", "first", "all"]
    assert "positions changed from all to first" in ready[1].reason
    assert "positions changed from first to all" in ready[2].reason
    assert ready[1].stratum.endswith("judged by the first draft token")
    assert ready[1].acceptance.rate == pytest.approx(0.7, abs=0.02)
    summary = describe(CONFIG, state)
    assert summary.acceptance is not None
    assert summary.acceptance.positions == "all"


def test_drafting_stops_when_nothing_is_drafted_not_when_the_first_position_has_no_counts() -> None:
    records = at_k(11, np.full(1_000, 0.7), WALK[:1_000])
    batch = observed(records)
    odd = replace(
        batch[800:], first_drafted=np.zeros(200, dtype=np.int64), first_accepted=np.zeros(200, dtype=np.int64)
    )
    state, _ = fold(CONFIG, StreamState(), batch[:800])
    without_first, _ = fold(CONFIG, state, odd)
    assert without_first.drafted_requests.tolist() == state.drafted_requests.tolist()
    assert (without_first.undrafted, describe(CONFIG, without_first).verdict) == (0, "steady")
    nothing = replace(odd, drafted=odd.first_drafted, accepted=odd.first_drafted)
    stopped, _ = fold(CONFIG, state, nothing)
    assert (stopped.undrafted, describe(CONFIG, stopped).verdict) == (200, "drafting_stopped")
    from_the_start, _ = fold(CONFIG, StreamState(), odd[:50])
    assert describe(CONFIG, fold(CONFIG, from_the_start, nothing[50:])[0]).verdict == "drafting_stopped"


def test_neither_the_cuts_of_batches_nor_other_streams_change_the_state() -> None:
    records, _ = following(12, np.repeat([0.8, 0.6, 0.8], [AS_BEFORE, AFTER, 500]))
    fixed = with_k(at_k(13, np.full(200, 0.7), np.full(200, 4), first=len(records)), 4)
    batch = observed([*records, *fixed])
    whole, findings = fold(CONFIG, StreamState(), batch)
    assert [finding.direction for finding in findings if isinstance(finding, DriftOpened)] == ["down"]
    cuts = [0, *sorted(np.random.default_rng(14).choice(len(batch), 40, replace=False).tolist()), len(batch)]
    parts, told, together = StreamState(), [], [StreamState()] * 3
    for start, stop in pairwise(cuts):
        parts, news = fold(CONFIG, decode_state(encode_state(parts)), batch[start:stop])
        told += news
        together = [state for state, _ in fold_many(CONFIG, together, [batch[start:stop]] * 3)]
    assert told == findings
    assert {encode_state(state) for state in (whole, parts, *together)} == {encode_state(whole)}


def test_a_setting_keeps_its_number_and_the_first_position_has_a_bit_of_its_own() -> None:
    records = [
        *at_k(15, np.full(1, 0.7), np.full(1, 4)),
        *without_positions(at_k(16, np.full(1, 0.7), np.full(1, 4))),
    ]
    by_first, by_all = settings_of(observed(records)).tolist()
    assert unpack(by_all) == Setting("request", None, "unknown", "unknown", True, "all")
    assert unpack(by_first) == Setting("request", None, "unknown", "unknown", True, "first")
    assert by_all == RULE_UNKNOWN_LENGTH_KNOWN
    assert by_first - by_all == 2 ** (1 + 2 + 2 + 11 + len(KINDS) - 1)
    assert without_configuration(by_first) == by_first


RULE_UNKNOWN_LENGTH_KNOWN = 3 << 3 | 1  # as it was packed before positions were told apart


@pytest.mark.parametrize(
    ("first_drafted", "first_accepted", "k"),
    [
        ([5, -1], [4, 3], -1),  # one without the other
        ([-1, -1], [4, -1], -1),
        ([5, -1], [6, -1], -1),
        ([21, -1], [4, -1], -1),  # more than in all
        ([5, -1], [-2, -1], -1),
        ([5, -1], [4, -1], 4),  # K is told
    ],
)
def test_first_positions_that_contradict_are_refused(
    first_drafted: list[int], first_accepted: list[int], k: int
) -> None:
    batch = ObservationBatch.of(
        [1, 2], ["a", "a"], [20, 20], [9, 9], [0.0, 1.0], first_position=[(5, 4), None]
    )
    with pytest.raises(ValueError, match="first_"):
        replace(
            batch,
            first_drafted=np.array(first_drafted),
            first_accepted=np.array(first_accepted),
            num_speculative_tokens=np.array([k, -1]),
        )

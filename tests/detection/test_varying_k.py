"""Where K varies a record is judged by its first position: K moves nothing then, and a worse draft does."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

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
from driftguard.detection.state.stream_state import with_varying_k
from driftguard.detection.statistics.strata import (
    KINDS,
    VARIES,
    Setting,
    settings_of,
    unpack,
    without_configuration,
)
from driftguard.records import AcceptanceRecord
from tests.detection.varying_k import at_k, following, with_k, without_positions

CONFIG = DetectorConfig(minimum_drop=0.1)
WALK = np.repeat([3, 5, 2, 6, 4, 6, 3, 1, 5, 4], 250)  # as the load of a server moves it
AS_BEFORE, AFTER = 1_200, 400
LEARNED = 3_600  # requests: the stream is no longer young


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
    quality = np.concatenate([np.full(LEARNED, 0.8), np.linspace(0.8, 0.6, 500)])
    records, k = following(seed, quality)
    assert np.median(k[:LEARNED]) - np.median(k[-100:]) >= 2
    by_first, by_all = opened(records), opened(without_positions(records))
    assert [alarm.direction for alarm in by_first] == ["down"]
    assert all(alarm.ordinal > by_first[0].ordinal + 100 for alarm in by_all)


def test_at_a_known_k_all_positions_are_judged_whatever_else_is_given() -> None:
    records = at_k(7, np.full(1_200, 0.7), np.full(1_200, 4))
    given, left_out = with_k(records, 4), with_k(without_positions(records), 4)
    assert encode_state(found(given)[0]) == encode_state(found(left_out)[0])
    ready = [finding for finding in found(given)[1] if isinstance(finding, BaselineReady)]
    assert [finding.acceptance.positions for finding in ready] == ["all"]


def with_own_k(records: list[AcceptanceRecord], k: NDArray[np.int64]) -> list[AcceptanceRecord]:
    return [with_k([record], int(own))[0] for record, own in zip(records, k, strict=True)]


def selected(seed: int, quality: NDArray[np.float64], *, first: int = 0) -> list[AcceptanceRecord]:
    """K is told: it rises with what the request itself accepts, and falls with the load, which
    is higher after 1,500 requests: only the best ones keep a large K then."""
    rng = np.random.default_rng(seed)
    own = np.clip(quality + rng.normal(0.0, 0.08, len(quality)), 0.05, 0.95)
    load = np.where(np.arange(len(quality)) < 1_500, 0.0, 1.0)
    k = np.clip(np.rint(3.0 + 25.0 * (own - quality) - load), 1, 6).astype(np.int64)
    return with_own_k(at_k(seed, own, k, first=first), k)


@pytest.mark.parametrize("seed", [21, 22, 23])
def test_a_k_that_is_told_and_follows_the_load_and_the_request_is_no_drift(seed: int) -> None:
    records = selected(seed, np.full(4_000, 0.7))
    assert opened(records) == []
    assert opened(without_positions(records)) == []


@pytest.mark.slow
def test_a_worse_draft_is_found_while_k_is_told_and_moves() -> None:
    (alarm,) = opened(selected(24, np.repeat([0.7, 0.55], [LEARNED, 600])))
    assert (alarm.direction, {change.after.positions for change in alarm.segments}) == ("down", {"first"})
    assert LEARNED <= alarm.ordinal <= LEARNED + 200
    assert alarm.interval[0] <= LEARNED + 1 <= alarm.interval[1]
    delays = []
    for seed in range(24, 34):
        (later, *_) = opened(without_positions(selected(seed, np.repeat([0.7, 0.4], [LEARNED, 600]))))
        assert later.direction == "down"
        delays.append(later.ordinal - LEARNED)
    print(f"seeds 24..33: {delays}")
    assert min(delays) > 0
    assert np.median(delays) <= 400


def test_a_k_that_is_set_anew_now_and_then_is_judged_by_all_positions() -> None:
    k = np.repeat([3, 5, 4, 5], 500)
    state, _ = found(with_own_k(at_k(25, np.full(2_000, 0.7), k), k))
    assert (state.k_newest, state.k_changes) == (5, 3)
    assert {state.positions_of(code) for code in range(len(state.setting_of_stratum))} == {"all"}


def test_whether_k_varies_does_not_depend_on_batches() -> None:
    k = np.random.default_rng(26).choice([-1, 3, 3, 3, 4], 400)
    records = [
        record if own < 0 else with_k([record], int(own))[0]
        for record, own in zip(at_k(26, np.full(400, 0.7), np.full(400, 4)), k, strict=True)
    ]
    batch = observed([one if n % 3 else without_positions([one])[0] for n, one in enumerate(records)])
    whole, varies, *end = with_varying_k(StreamState(), batch)
    newest, changes = -1, 0
    for place in range(0, 400, 7):
        cut = slice(place, place + 7)
        part, own, newest, changes = with_varying_k(
            StreamState(k_newest=newest, k_changes=changes), batch[cut]
        )
        assert own.tolist() == varies[cut].tolist()
        assert part.num_speculative_tokens.tolist() == whole.num_speculative_tokens[cut].tolist()
    assert [newest, changes] == end == [int(k[k >= 0][-1]), VARIES]
    assert 0 < varies.sum() < (k >= 0).sum()
    assert whole.by_first[-100:].any()


def test_no_baseline_is_of_both_kinds_and_a_new_one_says_why() -> None:
    fixed = with_k(at_k(8, np.full(900, 0.7), np.full(900, 4)), 4)
    varied = at_k(9, np.full(900, 0.7), WALK[:900], first=900)
    unknown = without_positions(at_k(10, np.full(900, 0.7), np.full(900, 4), first=1_800))
    state, findings = found([*fixed, *varied, *unknown])
    ready = [finding for finding in findings if isinstance(finding, BaselineReady)]
    assert [finding.acceptance.positions for finding in ready] == ["all", "first", "all"]
    assert "positions changed from all to first" in ready[1].why.text
    assert "positions changed from first to all" in ready[2].why.text
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
    choosing = selected(27, np.full(900, 0.8), first=len(records) + 200)
    later = selected(28, np.full(900, 0.8), first=len(records) + 1_100)
    batch = observed([*records, *fixed, *choosing, *without_positions(later)])
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
    by_first, by_all = settings_of(observed(records), np.zeros(2, dtype=np.bool_)).tolist()
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

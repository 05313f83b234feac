"""A change while the reference period of a segment is under way is neither learned nor missed."""

from __future__ import annotations

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
    fold,
)
from driftguard.detection.fold_streams import fold_many
from driftguard.detection.state.codec import decode_state, encode_state
from driftguard.detection.statistics.baseline import SUMS
from driftguard.detection.statistics.level_shift import BINS, OF_BIN, SMALLEST_BIN, add_to_bins, find
from tests.benchmarks.detection.dependent import DEPENDENT
from tests.detection.traffic import fold_all, requests

NAMES, SHARES = ["chat", "code", "german", "tools", "rare"], [0.4, 0.3, 0.17, 0.1, 0.03]
MEANS = np.array([0.7, 0.65, 0.6, 0.55, 0.65])
RARE = NAMES.index("rare")
CONFIG = DetectorConfig()
CASES = 12  # seeds


def traffic(seed: int, changed_at: int, by: float, count: int = 30_000) -> tuple[ObservationBatch, list[int]]:
    """Of five segments; the rare one accepts more by `by` from its own request `changed_at` on. Also the
    ordinals of its requests."""
    rng = np.random.default_rng(seed)
    code = rng.choice(len(NAMES), count, p=SHARES)
    means, own = MEANS[code], np.flatnonzero(code == RARE)
    means[own[changed_at:]] += by
    return requests(rng, means, [NAMES[each] for each in code]), (own + 1).tolist()


def opened(findings: list[Finding], direction: str) -> list[DriftOpened]:
    return [each for each in findings if isinstance(each, DriftOpened) and each.direction == direction]


@pytest.mark.slow
@pytest.mark.parametrize("fell_at", [120, 400])
def test_a_fall_within_the_reference_period_of_a_rare_segment_is_found(fell_at: int) -> None:
    found = held = 0
    for seed in range(CASES):
        batch, own = traffic(seed, fell_at, -0.2)
        for alarm in opened(fold_all(batch[: own[min(fell_at + 500, len(own) - 1)]])[1], "down"):
            delay = sum(own[fell_at] <= ordinal <= alarm.ordinal for ordinal in own)
            if [change.segment for change in alarm.segments] != ["rare"] or delay > 500:
                continue
            found += 1
            held += alarm.interval[0] <= own[fell_at] <= alarm.interval[1]
            (change,) = alarm.segments
            assert change.adjusted is not None
            assert change.adjusted.before == pytest.approx(0.65, abs=0.05)
            assert change.adjusted.after == pytest.approx(0.45, abs=0.05)
    print(f"seeds 0..{CASES - 1}: {found} found, of which the interval holds {held}")
    assert found >= CASES - 1
    assert held >= CASES - 2


def test_a_fall_after_a_rise_within_the_reference_period_is_found() -> None:
    """A baseline of before and after the rise would lie below what is normal by then."""
    found = 0
    for seed in range(CASES):
        rng = np.random.default_rng([1, seed])
        means = np.where(np.arange(6_000) < 240, 0.55, 0.75)
        means[4_000:] -= 0.1
        findings = fold_all(requests(rng, means))[1]
        assert not opened(findings, "up")
        found += any(4_000 < alarm.ordinal < 4_200 for alarm in opened(findings, "down"))
    assert found == CASES


def test_a_baseline_of_the_first_part_says_so() -> None:
    batch, _ = traffic(0, 240, -0.2)
    (ready,) = [
        each for each in fold_all(batch)[1] if isinstance(each, BaselineReady) and each.segment == "rare"
    ]
    assert ready.requests < 240
    assert ready.why.text == "first baseline of the segment; of what came before acceptance fell"
    assert ready.mean_per_request == pytest.approx(0.65, abs=0.03)


@pytest.mark.parametrize("by", [-0.2, 0.2])
def test_it_is_found_alike_however_batched(by: float) -> None:
    batch, own = traffic(3, 240, by)
    batch = batch[: own[700]]
    whole, findings = fold(CONFIG, StreamState(), batch)
    cuts = np.random.default_rng(4).choice(np.arange(1, len(batch)), 200, replace=False)
    cut, side = StreamState(), StreamState()
    pieces: list[Finding] = []
    for start, stop in pairwise([0, *sorted(cuts.tolist()), len(batch)]):
        cut, found = fold(CONFIG, decode_state(encode_state(cut)), batch[start:stop])
        pieces += found
        ((side, _), _) = fold_many(CONFIG, [side, cut], [batch[start:stop], batch[:0]])
    assert encode_state(cut) == encode_state(whole) == encode_state(side)
    assert pieces == findings


def test_a_fall_that_wanders_is_found_alike_however_batched() -> None:
    """How long a block of requests that depend on each other may be follows from how many come in an hour."""
    rng = np.random.default_rng(1)
    names = np.array(NAMES)[rng.choice([0, RARE], 11_000, p=[0.95, 0.05])]
    means = np.full(len(names), 0.7)
    since = np.arange((names == "rare").sum()) - 250
    means[names == "rare"] = np.where(since < 0, 0.65, np.where(since // 60 % 2 == 0, 0.3, 0.55))
    batch = requests(rng, means, names.tolist())
    whole, findings = fold(CONFIG, StreamState(), batch)
    state, pieces = StreamState(), []
    for start, stop in pairwise([0, 3_800, 7_600, len(batch)]):
        state, found = fold(CONFIG, state, batch[start:stop])
        pieces += found
    ready = [each for each in findings if isinstance(each, BaselineReady) and each.segment == "rare"]
    assert [each.why.before_fall for each in ready] == [True]
    assert pieces == findings
    assert encode_state(state) == encode_state(whole)


def test_bins_hold_the_sums_of_all_requests_in_order() -> None:
    rng = np.random.default_rng(5)
    terms = rng.random((1_000, SUMS))
    bins, done = np.zeros((BINS, OF_BIN)), 0
    for size in (1, 7, 300, 92, 600):
        bins = add_to_bins(
            bins, done, terms[done : done + size], 1.0 + np.arange(done, done + size, dtype=np.float64)
        )
        done += size
    assert bins[:, :SUMS].sum(axis=0) == pytest.approx(terms.sum(axis=0))
    size = SMALLEST_BIN * 4
    assert bins[3, :SUMS] == pytest.approx(terms[3 * size : 4 * size].sum(axis=0))
    assert bins[3, SUMS] == 4 * size
    assert bins[1_000 // size, SUMS] == 1_000


@pytest.mark.slow
def test_traffic_without_a_change_shows_none() -> None:
    """Independent requests, and such as depend on each other."""
    for family in DEPENDENT:
        if family.kind == "window":
            continue
        shown = 0
        for seed in range(200):
            batch = family.batch([6, seed], 500)
            x = batch.accepted / batch.drafted
            terms = np.zeros((500, SUMS))
            terms[:, 0], terms[:, 1] = 1.0, x
            shown += find(add_to_bins(np.zeros((BINS, OF_BIN)), 0, terms, batch.ended_at), 500) is not None
        print(f"{family.name}: {shown} of 200, seeds [6, 0..199]")
        assert shown <= 4

"""Requests of equally many steps: an answer is longer because more was accepted, for no other reason."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from driftguard.detection import DetectorConfig, Finding, ObservationBatch, describe, fold
from driftguard.detection.state.codec import encode_state
from tests.detection.statistics.test_strata import by_length, opened
from tests.detection.traffic import BETWEEN_REQUESTS, START, fold_all

pytestmark = pytest.mark.slow

CONFIG = DetectorConfig()
K = 4
STEPS = {"constant": (40, 41), "nearly constant": (36, 45)}


def of_steps(
    rng: np.random.Generator, mean: float, count: int, steps: tuple[int, int], *, first_ordinal: int = 1
) -> ObservationBatch:
    """A step emits what it accepted and one token more. `steps`: least, and one above the most."""
    precision = mean * (1.0 - mean) / BETWEEN_REQUESTS**2 - 1.0
    acceptance = rng.beta(mean * precision, (1.0 - mean) * precision, count)
    drawn = rng.integers(*steps, count)
    accepted = rng.binomial(K * drawn, acceptance)
    ordinals = np.arange(first_ordinal, first_ordinal + count)
    return ObservationBatch.of(
        ordinals,
        ["chat"] * count,
        K * drawn,
        accepted,
        START + ordinals.astype(np.float64),
        num_speculative_tokens=np.full(count, K),
        output_tokens=accepted + drawn,
    )


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("fallen", [0.45, 0.6])
def test_a_fall_is_found_as_a_fall_and_as_soon_as_without_lengths(steps: str, fallen: float) -> None:
    for seed in range(8):
        rng = np.random.default_rng(seed)
        good = of_steps(rng, 0.70, 2_000, STEPS[steps])
        bad = of_steps(rng, fallen, 1_000, STEPS[steps], first_ordinal=2_001)
        found = []
        for known in (True, False):
            blind = np.full(2_000, -1)
            state, _ = fold_all(good if known else replace(good, output_tokens=blind))
            after = bad if known else replace(bad, output_tokens=blind[:1_000])
            found.append(opened(fold(CONFIG, state, after)[1]))
        ((alarm,), (without,)) = found
        assert alarm.direction == "down"
        assert alarm.before.rate == pytest.approx(0.70, abs=0.02)
        assert alarm.after.rate < alarm.before.rate
        assert all(change.after.rate < change.before.rate for change in alarm.segments)
        assert alarm.ordinal == without.ordinal


@pytest.mark.parametrize(("steps", "follows"), [((40, 41), True), ((36, 45), True), ((10, 200), False)])
def test_the_status_says_where_length_is_not_used(steps: tuple[int, int], follows: bool) -> None:
    state, _ = fold_all(of_steps(np.random.default_rng(1), 0.70, 500, steps))
    assert describe(CONFIG, state).segments[0].length_of_acceptance is follows


def shifted(seed: int) -> tuple[ObservationBatch, ObservationBatch]:
    rng = np.random.default_rng(seed)
    return by_length(rng, 0.0, 1_500, 1), by_length(rng, -1.5, 1_500, 1_501, drop=0.1)


def in_pieces(seed: int) -> tuple[bytes, list[Finding]]:
    before, after = shifted(seed)
    state, _ = fold_all(before)
    findings = []
    for place in range(0, len(after), 97):
        state, found = fold(CONFIG, state, after[place : place + 97])
        findings += found
    return encode_state(state), findings


def test_lengths_that_shift_under_a_worse_draft_fold_alike_however_batched() -> None:
    for seed in range(4):
        before, after = shifted(seed)
        state, findings = fold(CONFIG, fold_all(before)[0], after)
        assert [alarm.direction for alarm in opened(findings)] == ["down"]
        assert in_pieces(seed) == (encode_state(state), findings)

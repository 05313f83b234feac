"""Requests of as many steps each: their answers are longer because more was accepted, and for no other reason."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from driftguard.detection import DetectorConfig, ObservationBatch, describe, fold
from tests.detection.test_strata import by_length, opened
from tests.detection.traffic import BETWEEN_REQUESTS, START, fold_all

CONFIG = DetectorConfig()
K = 4
STEPS = {"constant": (40, 41), "nearly constant": (36, 45)}


def of_steps(
    rng: np.random.Generator, mean: float, count: int, steps: tuple[int, int], *, first_ordinal: int = 1
) -> ObservationBatch:
    """A step emits what it accepted and one token more; `steps` of a request from the first to below the last."""
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


def test_no_alarm_says_the_contrary_of_before_and_after() -> None:
    """Answers become much shorter, of which the draft accepts more, though less than answers so short did."""
    told = 0
    for seed in range(8):
        rng = np.random.default_rng(seed)
        state, _ = fold_all(by_length(rng, 0.0, 1_500, 1))
        findings = fold(CONFIG, state, by_length(rng, -1.5, 1_500, 1_501, drop=0.1))[1]
        for alarm in opened(findings):
            told += 1
            for change in alarm.segments:
                assert (alarm.direction == "up") == (change.after.rate > change.before.rate)
    assert told <= 8

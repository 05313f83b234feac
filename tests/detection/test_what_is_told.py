"""The number that is tested is the number that is printed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftguard.detection import AlarmWithheld, DetectorConfig, DriftOpened, fold
from driftguard.records.documents.acceptance import AdjustedChange, from_to
from tests.detection.statistics.test_strata import by_length
from tests.detection.traffic import fold_all, normal, requests

CONFIG = DetectorConfig()


def test_shorter_answers_of_a_worse_draft_are_told_as_they_are_tested() -> None:
    """Of answers so much shorter the draft accepts more than before, and less than it did of such answers."""
    contrary = 0
    for seed in range(8):
        rng = np.random.default_rng(seed)
        before, after = by_length(rng, 0.0, 1_500, 1), by_length(rng, -1.5, 1_500, 1_501, drop=0.1)
        found = fold(CONFIG, fold_all(before)[0], after)[1]
        assert not any(isinstance(finding, AlarmWithheld) for finding in found), seed
        (alarm,) = (finding for finding in found if isinstance(finding, DriftOpened))
        assert alarm.direction == "down", seed
        (segment,) = alarm.segments
        assert alarm.adjusted == segment.adjusted
        # At their length they accepted .6 and 1.5 standard deviations of .09 more.
        assert alarm.adjusted.before == pytest.approx(0.735, abs=0.04), seed
        assert 0.05 < alarm.adjusted.before - alarm.adjusted.after < 0.25, seed
        if segment.after.rate > segment.before.rate:
            contrary += 1
            assert alarm.adjusted.counted_differs, seed
            assert alarm.adjusted.because == ("answers are shorter",), seed
    assert contrary >= 4


def test_what_is_counted_is_not_told_where_it_says_the_same() -> None:
    rng = np.random.default_rng(1)
    before, after = by_length(rng, 0.0, 1_500, 1), by_length(rng, 0.0, 500, 1_501, drop=0.1)
    (alarm,) = (
        finding for finding in fold(CONFIG, fold_all(before)[0], after)[1] if isinstance(finding, DriftOpened)
    )
    assert not alarm.adjusted.counted_differs


def agrees(direction: str, told: AdjustedChange) -> bool:
    before, after = (float(part) for part in from_to(told.before, told.after).split(" to "))
    return after < before if direction == "down" else after > before


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    shift=st.floats(-2.0, 2.0),
    drop=st.floats(-0.3, 0.3),
    kind=st.sampled_from(["lengths", "segments", "heavy"]),
    rare=st.floats(0.01, 0.5),
)
def test_the_direction_agrees_with_the_numbers_that_are_told(
    seed: int, shift: float, drop: float, kind: str, rare: float
) -> None:
    rng = np.random.default_rng(seed)
    if kind == "lengths":
        parts = [by_length(rng, 0.0, 1_200, 1), by_length(rng, shift, 600, 1_201, drop=drop)]
    elif kind == "heavy":
        means = np.where(rng.random(600) < rare, 0.95, 0.6 - drop)
        parts = [normal(rng, np.full(1_200, 0.6), 0.1), normal(rng, means, 0.1, first_ordinal=1_201)]
    else:
        names = ["chat" if each else "code" for each in rng.random(4_000) > rare]
        means = 0.6 - np.where(
            np.arange(4_000) < 2_500, 0.0, np.where(np.array(names) == "code", drop, -drop / 3)
        )
        made = requests(rng, means, names)
        parts = [made[:2_500], made[2_500:]]
    state, _ = fold_all(parts[0])
    for finding in fold(CONFIG, state, parts[1])[1]:
        if isinstance(finding, DriftOpened):
            assert agrees(finding.direction, finding.adjusted)
            for change in finding.segments:
                assert change.adjusted is not None
                assert agrees(finding.direction, change.adjusted)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.floats(0.0, 1.0), st.floats(0.002, 1.0))
def test_two_levels_are_printed_as_two_numbers(before: float, distance: float) -> None:
    low, high = (float(part) for part in from_to(before, before + distance).split(" to "))
    assert low < high

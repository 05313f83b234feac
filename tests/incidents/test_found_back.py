"""How often is a fall that a comparison found called over by mistake, and how soon once it is?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime

import numpy as np

from driftguard.incidents.found_back import SIZES, level_at, p_value, sizes_at
from driftguard.store.acceptance_levels import NewestLevel

MIDPOINT = 0.6
EVERY = 10  # minutes between two looks, in which 60 requests come


def is_back_at(seed: int, mean: float, days: float) -> int | None:
    """Minutes after the incident opened, if it is called over within so many days."""
    for look, newest in enumerate(_looks(seed, mean, int(days * 1_440 / EVERY)), start=1):
        level = level_at(EVERY * look)
        if any(p_value(one, MIDPOINT, 1.0) <= level for one in newest):
            return EVERY * look
    return None


def _looks(seed: int, mean: float, count: int) -> Iterator[list[NewestLevel]]:
    rng, kept = np.random.default_rng(seed), np.zeros(0)
    for _ in range(count):
        drafted = 4 * rng.integers(10, 40, 60)
        accepted = rng.binomial(drafted, np.clip(rng.normal(mean, 0.1, 60), 0.0, 1.0))
        kept = np.concatenate([kept, accepted / drafted])[-max(SIZES) :]
        yield [
            NewestLevel("a", size, len(own), 1, 1, own.mean(), own.var(ddof=1), datetime.now(UTC))
            for size in SIZES
            for own in [kept[-size:]]
        ]


def wandering_is_back_at(seed: int, mean: float, days: float) -> int | None:
    rng, memory, deviation = np.random.default_rng(seed), 500, 0.03
    moods, mood = [], 0.0
    for _ in range(int(days * 1_440 / EVERY) * 60):
        mood += rng.normal(0.0, deviation * math.sqrt(2 / memory)) - mood / memory
        moods.append(mood)
    x = np.clip(mean + np.array(moods) + rng.normal(0.0, 0.1, len(moods)), 0.0, 1.0)
    inflation = 1.0 + 2.0 * memory * deviation**2 / 0.1**2
    for look in range(1, len(x) // 60 + 1):
        for size in sizes_at(inflation):
            own = x[: 60 * look][-size:]
            newest = NewestLevel("a", size, len(own), 1, 1, own.mean(), own.var(ddof=1), datetime.now(UTC))
            if p_value(newest, MIDPOINT, inflation) <= level_at(EVERY * look):
                return EVERY * look
    return None


def test_halfway_back_for_days_is_not_over() -> None:
    """Seeds 0 to 19, three days each. By three standard errors of 200 requests at each look eight are."""
    assert [seed for seed in range(20) if is_back_at(seed, MIDPOINT, 3.0) is not None] == []


def test_back_from_a_fall_of_a_tenth_is_over_within_the_hour() -> None:
    for seed in range(10):
        minutes = is_back_at(seed, MIDPOINT + 0.05, 1.0)
        assert minutes is not None, seed
        assert minutes <= 60, seed


def test_back_in_traffic_that_wanders_is_over_within_a_day() -> None:
    """From a fall of .15, of users whose mean has a memory of 500 requests. Halfway back is not over."""
    assert [seed for seed in range(3) if wandering_is_back_at(seed, MIDPOINT, 2.0) is not None] == []
    for seed in range(3):
        assert wandering_is_back_at(seed, MIDPOINT + 0.075, 1.0) is not None, seed

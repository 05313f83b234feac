"""How often is a fall that a comparison found called over by mistake, and how soon once it is?"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import numpy as np

from driftguard.incidents.found_back import SIZES, level_at, p_value
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


def test_halfway_back_for_days_is_not_over() -> None:
    """Seeds 0 to 19, three days each. By three standard errors of 200 requests at each look eight are."""
    assert [seed for seed in range(20) if is_back_at(seed, MIDPOINT, 3.0) is not None] == []


def test_back_from_a_fall_of_a_tenth_is_over_within_the_hour() -> None:
    for seed in range(10):
        minutes = is_back_at(seed, MIDPOINT + 0.05, 1.0)
        assert minutes is not None, seed
        assert minutes <= 60, seed

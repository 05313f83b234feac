"""From when to when a level was another one."""

from __future__ import annotations

import numpy as np
import pytest

from driftguard.detection.statistics.change_point import changed_stretch


@pytest.mark.parametrize("told", [280, 300, 330])
@pytest.mark.parametrize("gap", [-1.0, 1.0])
def test_a_change_that_came_back_is_found_from_about_where_it_began(told: int, gap: float) -> None:
    residual = np.random.default_rng(41).normal(size=1_000)
    residual[300:700] += gap
    first, last = changed_stretch(residual, told)
    assert abs(first - 300) <= 8
    assert abs(last - 699) <= 8


def test_one_that_has_not_come_back_ends_with_the_last() -> None:
    residual = np.concatenate([np.zeros(50), np.full(30, -0.2)])
    assert changed_stretch(residual, 55) == (50, 79)

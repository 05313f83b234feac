"""One level, or one unit of wealth, for tests without end."""

from __future__ import annotations

import math

from driftguard import alpha_spending


def test_all_shares_together_are_nearly_one_and_never_more() -> None:
    first = 100_000
    # The rest lies below the integral from first + 1 on, of the same formula.
    rest = 1.0 / (2.11 * math.log(first + 1))
    assert 0.999 < sum(alpha_spending.share(before) for before in range(first)) + rest < 1.0


def test_later_tests_get_less_and_never_nothing() -> None:
    shares = [alpha_spending.share(before) for before in (0, 1, 10, 10_000, 10_000_000)]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] > 1e-10

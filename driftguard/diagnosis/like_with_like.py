"""Captured requests that look like those before the change: are they accepted as before?

If new queries are the cause, the old kind is accepted as ever. If requests like those before are accepted
less, the traffic is not the cause, or not alone, however much it has moved as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from driftguard.diagnosis.captured_requests import (
    MINIMUM_SAMPLE,
    SAMPLE,
    Floats,
    conversations_of,
    distances_of,
    features_of,
)
from driftguard.diagnosis.comparisons import (
    EXCLUDED_SHARE,
    MAIN_SHARE,
    Difference,
    Pair,
    Rate,
    combined_difference,
    rate_of,
)
from driftguard.diagnosis.evidence import Captured

LEAST_PART: Final = 1 / 3  # of the captured requests: fewer look as before by chance alone

Outcome = Literal["fell", "kept", "unclear"]


@dataclass(frozen=True, slots=True)
class LikeWithLike:
    """Of `compared` requests since the change that look as before. `change`: of their acceptance, against
    captured requests before, inside segments."""

    compared: int
    change: Difference

    def outcome(self, move: float) -> Outcome:
        """Against the traffic's signed `move`. "fell": they moved with it, by at least half. "kept": the
        interval excludes half of it, in both directions."""
        if self.change.follows(move, MAIN_SHARE):
            return "fell"
        return "kept" if self.change.excludes(EXCLUDED_SHARE * abs(move)) else "unclear"


def compare(
    before: Sequence[Captured], after: Sequence[Captured], changed: Sequence[str]
) -> LikeWithLike | None:
    """None where too few captured requests of a changed segment have counts, or look as before.

    A request y looks as before if mean |y - X| - mean |X - X'| / 2 <= mean |y - Y| - mean |Y - Y'| / 2, X
    before and Y since, of other conversations: about half of them do where nothing moved, and hardly any
    where all are new (the energy score of y for each side). Requests of one conversation are one unit in the
    error.
    Paper: Gneiting, Raftery, Strictly proper scoring rules (JASA 102, 2007), section 5.1.
    """
    pairs, compared = [], 0
    for name in changed:
        old, new = (
            [one for one in side if one.segment == name and one.drafted and one.accepted is not None][
                -SAMPLE:
            ]
            for side in (before, after)
        )
        if min(len(old), len(new)) < MINIMUM_SAMPLE:
            continue
        alike = _alike(old, new)
        rates = _rate(old), _rate(alike)
        if (
            len(alike) >= max(MINIMUM_SAMPLE, LEAST_PART * len(new))
            and rates[0] is not None
            and rates[1] is not None
        ):
            pairs.append(Pair(rates[0], rates[1]))
            compared += len(alike)
    change = combined_difference(pairs)
    return LikeWithLike(compared, change) if change is not None else None


def _alike(old: Sequence[Captured], new: Sequence[Captured]) -> list[Captured]:
    x, y = features_of([one.prompt for one in old]), features_of([one.prompt for one in new])
    among_old, to_new = _among(x, old), _among(y, new)
    if np.isnan(among_old).all() or np.isnan(to_new).all():  # one conversation alone on a side
        return []
    spread_old, spread_new = float(np.nanmean(among_old)), float(np.nanmean(to_new))
    to_old = distances_of(y, x).mean(axis=1)
    near = to_old - spread_old / 2 <= to_new - spread_new / 2  # False where nothing can be compared
    return [one for one, is_near in zip(new, near, strict=True) if is_near]


def _among(rows: Floats, requests: Sequence[Captured]) -> Floats:
    """Mean distance of each to those of other conversations; NaN where there are none."""
    conversation = np.array(conversations_of(requests))
    others = (conversation[:, None] != conversation[None, :]).astype(np.float64)
    counts = others.sum(axis=1)
    sums = (distances_of(rows, rows) * others).sum(axis=1)
    means: Floats = np.divide(sums, counts, out=np.full(len(rows), np.nan), where=counts > 0)
    return means


def _rate(requests: Sequence[Captured]) -> Rate | None:
    return rate_of(_sums(requests))


def _sums(requests: Sequence[Captured]) -> Iterable[tuple[int, int]]:
    sums: dict[int, tuple[int, int]] = {}
    for number, one in zip(conversations_of(requests), requests, strict=True):
        drafted, accepted = sums.get(number, (0, 0))
        sums[number] = drafted + (one.drafted or 0), accepted + (one.accepted or 0)
    return sums.values()

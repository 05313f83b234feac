"""Acceptance in slices: by how long a prompt is, by how much of it came from the prefix cache, at position 1.

A draft that meets new queries accepts less of short and long prompts alike; a prefix cache that returns wrong
state, or a context that a draft no longer handles, shows only where prompts are long or cached.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from driftguard.diagnosis.comparisons import (
    EXCLUDED_SHARE,
    LEVEL,
    Difference,
    Pair,
    combined_difference,
    compare_ranks,
    difference,
    difference_of,
    first_rate_by_session,
    rate_by_session,
)
from driftguard.diagnosis.evidence import Observed

Property = Literal["cached_share", "prompt_tokens"]
NAMES: Final[dict[Property, str]] = {
    "cached_share": "the part of the prompt that came from the prefix cache",
    "prompt_tokens": "the length of the prompt",
}
LOW: Final = 1 / 3  # quantiles, between which the requests are left out
HIGH: Final = 2 / 3
LEAST_KNOWN: Final = 0.9  # of the requests must tell it
LEAST_REQUESTS: Final = 8  # in each slice and side
KEPT_SHARE: Final = 0.5  # of the fall in the upper slice: the lower one fell by no more than that
RELEVANT_SHIFT: Final = 0.15  # of P(after > before) off one half: the traffic itself became longer


@dataclass(frozen=True, slots=True)
class Slices:
    """The change of acceptance where the property is small and where it is large, inside segments.

    `more`: the change of the large ones less that of the small ones. `low_to`, `high_from`: bounds of the two
    slices, thirds of the requests of both sides. `traffic_moved`: the property itself is distributed
    otherwise than before, among all requests or the large ones, so that new ones may be accepted less.
    """

    of: Property
    low_to: float
    high_from: float
    low: Difference
    high: Difference
    more: Difference
    traffic_moved: bool

    @property
    def is_concentrated(self) -> bool:
        """The large ones changed, and the small ones by less than half of that: shown at LEVEL."""
        shown = self.more.p_value <= LEVEL / len(NAMES) and self.high.p_value <= LEVEL
        same_way = self.more.change * self.high.change > 0.0
        return shown and same_way and abs(self.low.change) <= KEPT_SHARE * abs(self.high.change)


def compare(of: Property, before: Sequence[Observed], after: Sequence[Observed]) -> Slices | None:
    """Of the requests of the changed segments. None where they do not tell the property, where a third of
    them has nearly the same value as another third, or too few lie in a slice.

    Requests differ, and those of a session belong together: the errors are those of `combined_difference`.
    """
    value = _VALUES[of]
    sides = [[(value(one), one) for one in side] for side in (before, after)]
    told = [[(v, one) for v, one in side if not math.isnan(v)] for side in sides]
    if any(len(known) < LEAST_KNOWN * len(side) or not side for known, side in zip(told, sides, strict=True)):
        return None
    low_to, high_from = np.quantile([v for side in told for v, _ in side], [LOW, HIGH])
    if not low_to < high_from:
        return None
    low = [[one for v, one in side if v <= low_to] for side in told]
    high = [[one for v, one in side if v >= high_from] for side in told]
    if min(len(part) for part in (*low, *high)) < LEAST_REQUESTS:
        return None
    small, large = _change(*low), _change(*high)
    if small is None or large is None:
        return None
    values = [[v for v, _ in side] for side in told]
    moved = _shifted(*values) or _shifted(*[[v for v in side if v >= high_from] for side in values])
    more = difference_of(large, small)
    return Slices(of, float(low_to), float(high_from), small, large, more, moved)


def _shifted(before: Sequence[float], after: Sequence[float]) -> bool:
    ranks = compare_ranks(before, after)
    return ranks.p_value <= LEVEL and abs(ranks.superiority - 0.5) >= RELEVANT_SHIFT


def change_among(
    before: Sequence[Observed], after: Sequence[Observed], is_in: Callable[[Observed], bool]
) -> Difference | None:
    """The change inside segments among requests of one kind. None where there are too few."""
    kept = [[one for one in side if is_in(one)] for side in (before, after)]
    return _change(*kept) if min(map(len, kept)) >= LEAST_REQUESTS else None


def _change(before: Sequence[Observed], after: Sequence[Observed]) -> Difference | None:
    names = {one.segment for one in before} & {one.segment for one in after}
    pairs = []
    for name in sorted(names):
        rates = [rate_by_session(one for one in side if one.segment == name) for side in (before, after)]
        if rates[0] is not None and rates[1] is not None:
            pairs.append(Pair(rates[0], rates[1]))
    return combined_difference(pairs)


def _cached_share(one: Observed) -> float:
    return math.nan if one.cached_share is None else one.cached_share


_VALUES: Final[dict[Property, Callable[[Observed], float]]] = {
    "cached_share": _cached_share,
    "prompt_tokens": lambda one: math.nan if one.prompt_tokens is None else float(one.prompt_tokens),
}


COLLAPSED_SHARE: Final = 1 / 3  # of position 1 before
LEAST_UNITS: Final = 5  # requests, or sessions, of a segment on each side
WHOLE_TRAFFIC: Final = 0.9  # of the requests since the change lie in segments that can be compared


@dataclass(frozen=True, slots=True)
class FirstPosition:
    """Of all traffic, changed segments or not: whether the first draft token is accepted depends on neither K
    nor what was drafted after it. A draft with other weights fails there at once, for everybody.

    `segments`: compared; `collapsed`: to COLLAPSED_SHARE or less; `kept`: shown to have fallen by less than
    half of `change`, which is that inside all of them. `covers`: part of the requests in these segments.
    """

    segments: int
    collapsed: int
    kept: int
    before: float
    after: float
    change: Difference
    covers: float

    @property
    def has_collapsed_everywhere(self) -> bool:
        """In every segment that can be compared, which are nearly all of the traffic."""
        return self.covers >= WHOLE_TRAFFIC and self.collapsed == self.segments

    @property
    def has_fallen_everywhere(self) -> bool:
        return self.covers >= WHOLE_TRAFFIC and not self.kept and self.change.high < 0.0


def compare_first(before: Sequence[Observed], after: Sequence[Observed]) -> FirstPosition | None:
    """None where no segment tells position 1 on both sides."""
    sizes: dict[str, int] = {}
    for one in after:
        sizes[one.segment] = sizes.get(one.segment, 0) + 1
    pairs: dict[str, Pair] = {}
    for name in sorted(sizes):
        rates = [
            first_rate_by_session(one for one in side if one.segment == name) for side in (before, after)
        ]
        if rates[0] and rates[1] and min(rates[0].requests, rates[1].requests) >= LEAST_UNITS:
            pairs[name] = Pair(rates[0], rates[1])
    change = combined_difference(list(pairs.values()))
    if change is None:
        return None
    drafted = sum(pair.after.drafted for pair in pairs.values())
    return FirstPosition(
        segments=len(pairs),
        collapsed=sum(pair.after.rate <= COLLAPSED_SHARE * pair.before.rate for pair in pairs.values()),
        kept=sum(
            difference(pair.before, pair.after).low > EXCLUDED_SHARE * change.change
            for pair in pairs.values()
        ),
        before=sum(pair.after.drafted * pair.before.rate for pair in pairs.values()) / drafted,
        after=sum(pair.after.drafted * pair.after.rate for pair in pairs.values()) / drafted,
        change=change,
        covers=sum(sizes[name] for name in pairs) / sum(sizes.values()),
    )

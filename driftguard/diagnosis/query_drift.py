"""Query drift without labels: did the prompts of a segment change, what are they like now?

Two-sample energy statistic of hashed n-gram features, with a permutation p-value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from driftguard.diagnosis.evidence import Captured
from driftguard.diagnosis.features import Floats, features_of

SAMPLE: Final = 150  # requests per segment and side; a matrix of 300 x 300 distances
MINIMUM_SAMPLE: Final = 10
PERMUTATIONS: Final = 999
MOST_EXAMPLES: Final = 3
NEAR: Final = 0.5  # of the distance to its own past: nearer than that looks like another segment
NEW_TOPIC: Final = "new topic"


@dataclass(frozen=True, slots=True)
class QueryChange:
    """Prompts of the changed segments before and after. `distance`: squared energy distance, unbiased,
    so about 0 if nothing moved.

    `nearest`: the known segment that the prompts look like now, or "new topic"; None while they have not
    moved. `examples`: record ids of captured requests that are least like the segment's own past.
    """

    requests_before: int
    requests_after: int
    distance: float
    p_value: float
    nearest: str | None
    examples: tuple[str, ...]


def compare(
    before: Sequence[Captured], after: Sequence[Captured], changed: Sequence[str], level: float
) -> QueryChange | None:
    """None where no changed segment has MINIMUM_SAMPLE captured requests on both sides.

    Statistic: sum over the changed segments c of n m / (n + m) E_c, where
    E = 2 mean |X - Y| - mean |X - X'| - mean |Y - Y'| over rows of features, X before, Y after.
    p-value: requests are relabelled within their segment, 999 seeded times, so that another mix of the
    changed segments is no query drift; (1 + as large) / 1000.
    Guarantee: P(p <= level) <= level, exactly, if the prompts of each segment are exchangeable. It does not
    hold under dependence: prompts of one session resemble each other, captures carry no session, and a few
    long conversations can look like a move.
    Paper: Szekely, Rizzo, Energy statistics (J. Stat. Planning and Inference 143, 2013).
    """
    past, now = _by_segment(before), _by_segment(after)
    usable = [
        name for name in changed if min(len(past.get(name, ())), len(now.get(name, ()))) >= MINIMUM_SAMPLE
    ]
    if not usable:
        return None
    rows = {name: features_of([one.prompt for one in requests]) for name, requests in past.items()}
    new_rows = {name: features_of([one.prompt for one in now[name]]) for name in usable}
    random = np.random.default_rng(0)
    observed, relabelled = 0.0, np.zeros(PERMUTATIONS)
    weight, distance = 0.0, 0.0
    for name in usable:
        x, y = rows[name], new_rows[name]
        scale = len(x) * len(y) / (len(x) + len(y))
        real, null = _energy(x, y, random)
        observed, relabelled = observed + scale * real, relabelled + scale * null
        weight, distance = weight + len(y), distance + len(y) * energy_distance(x, y)
    p_value = float((1 + np.sum(relabelled >= observed - 1e-12)) / (PERMUTATIONS + 1))
    moved = p_value <= level
    return QueryChange(
        requests_before=sum(len(past[name]) for name in usable),
        requests_after=sum(len(now[name]) for name in usable),
        distance=distance / weight,
        p_value=p_value,
        nearest=_nearest(usable, rows, new_rows) if moved else None,
        examples=_examples(now[usable[0]], rows[usable[0]], new_rows[usable[0]]) if moved else (),
    )


def energy_distance(x: Floats, y: Floats) -> float:
    """Squared energy distance of two samples of rows, unbiased: a row is not compared with itself."""
    inside = (float(_distances(one, one).sum()) / (len(one) * (len(one) - 1)) for one in (x, y))
    return 2.0 * float(_distances(x, y).mean()) - sum(inside)


def _energy(x: Floats, y: Floats, random: np.random.Generator) -> tuple[float, Floats]:
    """The statistic, and its values under PERMUTATIONS relabellings: -s' D s, s = (1/n, ..., -1/m, ...)."""
    both = np.concatenate([x, y])
    distances = _distances(both, both)
    labels = np.concatenate([np.full(len(x), 1.0 / len(x)), np.full(len(y), -1.0 / len(y))])
    signs = random.permuted(np.tile(labels, (PERMUTATIONS, 1)), axis=1)  # [PERMUTATIONS, n + m]
    null = -np.sum((signs @ distances) * signs, axis=1)
    return float(-labels @ distances @ labels), null


def _distances(x: Floats, y: Floats) -> Floats:
    squares = (x * x).sum(axis=1)[:, None] + (y * y).sum(axis=1)[None, :] - 2.0 * x @ y.T
    distances: Floats = np.sqrt(np.maximum(squares, 0.0))
    return distances


def _nearest(changed: Sequence[str], rows: Mapping[str, Floats], new_rows: Mapping[str, Floats]) -> str:
    """The segment whose past is nearest to what the first changed segment asks now. Described, not tested."""
    name = changed[0]
    own = energy_distance(rows[name], new_rows[name])
    others = {
        other: energy_distance(past, new_rows[name])
        for other, past in sorted(rows.items())
        if other not in changed and len(past) >= MINIMUM_SAMPLE
    }
    best = min(others, key=others.__getitem__, default=None)
    return best if best is not None and others[best] < NEAR * own else NEW_TOPIC


def _examples(requests: Sequence[Captured], past: Floats, now: Floats) -> tuple[str, ...]:
    """Those that are far from the past and near to the rest of the present: typical of what is new."""
    novelty = _distances(now, past).mean(axis=1) - _distances(now, now).mean(axis=1)
    return tuple(requests[place].record_id for place in np.argsort(-novelty)[:MOST_EXAMPLES])


def _by_segment(captured: Sequence[Captured]) -> dict[str, list[Captured]]:
    """At most SAMPLE of each segment: the newest, which stand last."""
    found: dict[str, list[Captured]] = {}
    for one in captured:
        found.setdefault(one.segment, []).append(one)
    return {name: requests[-SAMPLE:] for name, requests in found.items()}

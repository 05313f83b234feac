"""Does acceptance fall with the age of the server's process, and does a restart bring it back?

State that decays until a restart is the engine's. What the traffic does has no reason to follow restarts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from driftguard.diagnosis.comparisons import (
    LEVEL,
    Difference,
    Pair,
    combined_difference,
    interval,
    rate_by_session,
)
from driftguard.diagnosis.evidence import Observed, ProbeResult

LEAST_REQUESTS: Final = 24  # of one run of the server, so that its thirds say something
LEAST_KNOWN: Final = 0.9
LEAST_PROMPTS: Final = 8
RELEVANT_SHARE: Final = 0.1  # of the traffic's move, most of which comes with the change itself
SAME_START_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class ServerAge:
    """`runs`: of the server's process, from one start to the next, that are seen in the requests.

    `aged`: acceptance in the oldest third of a run less that in its youngest third, inside segments and on
    one side of the change: a sudden change shows nothing here. `cured`: acceptance after a restart less that
    before it. `probes_aged`: the same prompts at an old less those at a young server, before the change.
    `restarted`: a restart lies between the last request before the change and the first one after it.
    """

    runs: int
    aged: Difference | None
    cured: Difference | None
    probes_aged: Difference | None
    restarted: bool

    def falls_with_age(self, move: float) -> bool:
        return any(_shown(one, -1.0, move) for one in (self.aged, self.probes_aged))

    def probes_fall_with_age(self, move: float) -> bool:
        return _shown(self.probes_aged, -1.0, move)

    def is_cured(self, move: float) -> bool:
        return _shown(self.cured, 1.0, move)


def compare(
    before: Sequence[Observed],
    after: Sequence[Observed],
    probes_before: Sequence[ProbeResult],
) -> ServerAge | None:
    """Of the requests of the changed segments. None where the age of the server is not known.

    Errors are those of `combined_difference`. The wander of the traffic over hours is not in them, and can
    look like age within one run; a restart that cures is not a matter of the hour, unless servers are
    restarted at the same hour of each day.
    """
    known = [[one for one in side if one.server_started_at is not None] for side in (before, after)]
    if any(
        not side or len(told) < LEAST_KNOWN * len(side)
        for told, side in zip(known, (before, after), strict=True)
    ):
        return None
    pieces = [_runs(side) for side in known]
    runs = _runs([*known[0], *known[1]])
    within = [pair for piece in pieces for run in piece for pair in _pairs(_young(run), _old(run))]
    across = [
        pair for earlier, later in itertools.pairwise(runs) for pair in _pairs(_old(earlier), _young(later))
    ]
    last, first = max(known[0], key=_ended), min(known[1], key=_ended)
    return ServerAge(
        runs=len(runs),
        aged=combined_difference(within),
        cured=combined_difference(across),
        probes_aged=_probes_aged(probes_before),
        restarted=_start(first) > _start(last) + SAME_START_SECONDS,
    )


def _shown(found: Difference | None, sign: float, move: float) -> bool:
    if found is None or found.p_value > LEVEL:
        return False
    return sign * found.change >= RELEVANT_SHARE * abs(move)


def _runs(requests: Sequence[Observed]) -> list[list[Observed]]:
    """In the order of their starts; each in the order of time. Runs with few requests are left out."""
    found: list[list[Observed]] = []
    for one in sorted(requests, key=lambda one: (_start(one), _ended(one))):
        if not found or _start(one) > _start(found[-1][-1]) + SAME_START_SECONDS:
            found.append([])
        found[-1].append(one)
    return [run for run in found if len(run) >= LEAST_REQUESTS]


def _young(run: Sequence[Observed]) -> Sequence[Observed]:
    return run[: len(run) // 3]


def _old(run: Sequence[Observed]) -> Sequence[Observed]:
    return run[len(run) - len(run) // 3 :]


def _pairs(before: Sequence[Observed], after: Sequence[Observed]) -> list[Pair]:
    found = []
    for name in sorted({one.segment for one in before} & {one.segment for one in after}):
        rates = [rate_by_session(one for one in side if one.segment == name) for side in (before, after)]
        if rates[0] is not None and rates[1] is not None:
            found.append(Pair(rates[0], rates[1]))
    return found


def _probes_aged(probes: Sequence[ProbeResult]) -> Difference | None:
    """Per prompt: acceptance at ages in the oldest third of its replays less that in the youngest third; the
    mean over prompts, with a paired t interval at 99%. Prompts are replayed together, so what moves all
    prompts of one replay is in the mean, and not in its error."""
    aged: dict[str, list[tuple[float, float]]] = {}
    for one in probes:
        if one.ended_at is not None and one.server_started_at is not None and one.drafted:
            age = one.ended_at - one.server_started_at
            aged.setdefault(one.prompt, []).append((age, one.accepted / one.drafted))
    changes = []
    for replays in aged.values():
        third = len(replays) // 3
        if third:
            rates = [rate for _, rate in sorted(replays)]
            changes.append(float(np.mean(rates[-third:]) - np.mean(rates[:third])))
    if len(changes) < LEAST_PROMPTS:
        return None
    error = float(np.std(changes, ddof=1)) / len(changes) ** 0.5
    return interval(float(np.mean(changes)), error, len(changes) - 1)


def _ended(one: Observed) -> float:
    return one.ended_at or 0.0


def _start(one: Observed) -> float:
    return one.server_started_at or 0.0

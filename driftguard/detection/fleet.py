"""False pages over all streams of a sidecar together, instead of stream by stream.

Stream i of the N in service has its evidence E_i, the larger of the two sums that raise alarms
(`evidence.py`), and its A_i, the threshold at which it alone would be named. On f_i = E_i / A_i the streams
are tested together by e-BH (Wang, Ramdas 2022,
"False discovery rate control with e-values", at level 1):

    k* = max {k : at least k streams have f_i >= N / k}, and those with f_i >= N / k* are named.

A stream with an open incident keeps, as its f, the N / k that it was named with, and so counts on.

Assumptions: as in `evidence.py`, with the bets on a stream fair given the past of all streams, not only of
its own (Wang, Dandapanthula, Ramdas 2025, arXiv 2502.08539): what the others did must not foretell that a
stream which did not change accepts less. N is fixed, or grows, or shrinks by streams that no longer send and
whose end has nothing to do with what they accepted: they can no longer be named, and the bound is then one
for those that remain.

Guarantee. Let n_i(t) be the requests of stream i watched by time t. Each f_i, also one that was stopped, is
an e-detector on that clock: E[f_i(T)] <= E[n_i(T)] / A_i at every stopping time T of all streams together
(Shin, Ramdas, Rinaldo 2023). A stream that is one of k named has 1 / k <= f_i / N. So the part of the named
streams that did not change, FDP, has at any T

    E[FDP(T)] <= (1 / N) x sum over the streams that did not change of E[n_i(T)] / A_i

which bounds the error over patience, E[FDP(T)] / E[T] (Dandapanthula, Ramdas 2025, "Multiple testing in
multi-stream sequential change detection", arXiv 2501.04130). Where A_i is the requests of D days, and traffic
stays as it was measured, the right side is at most E[T] / D, with T in days. While no stream changes FDP is
1 at the first page, so that page comes after D days or more in expectation, however many streams there are.

Not claimed: a bound on E[FDP(T)] alone (the same paper: no detector with a finite time between alarms has
one that is not trivial), and D days between false pages once some streams did change: each of them lowers
the threshold of the others.

When: at the end of each batch of records, over the streams that sent records in it and those with an open
incident; the others count as f = 0, which can only name fewer. An incident stays open until its own stream
recovers; the bound is about the streams that e-BH names at T, among which it is no more where others that it
was named with have closed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from driftguard.detection.config import DetectorConfig
from driftguard.detection.findings import DriftOpened, Finding
from driftguard.detection.fold import fold
from driftguard.detection.fold_streams import fold_many
from driftguard.detection.observations import ObservationBatch
from driftguard.detection.state.stream_state import StreamState
from driftguard.detection.statistics.bets import DOWN, UP, mean_over_bets
from driftguard.detection.steps.evidence import SHARES


@dataclass(frozen=True, slots=True)
class Fleet:
    """N streams in service; of those with an open incident the N / k that they were named with."""

    streams: int
    named: Mapping[int, float]

    def factor(self, stream: int | None = None) -> float:
        """N / k for `stream`, or for any that has no incident: what its A is multiplied by."""
        others = np.sort([share for other, share in self.named.items() if other != stream])[::-1]
        ranks = np.arange(2, len(others) + 2)
        passes = np.flatnonzero(others * ranks >= self.streams)
        return self.streams / (int(ranks[passes[-1]]) if len(passes) else 1)


@dataclass(frozen=True, slots=True, eq=False)
class Folded:
    """What folding a batch gave, with the stream's A multiplied by `factor`."""

    state: StreamState
    findings: list[Finding]
    factor: float


def fold_fleet(
    config: DetectorConfig,
    fleet: Fleet,
    states: Mapping[int, StreamState],
    batches: Mapping[int, ObservationBatch],
) -> dict[int, Folded]:
    """Folds one batch of each of some streams, in order of their numbers.

    A stream is folded again, from its state before, where the end of the batch shows that it is to be named
    together with others although none of them reached the threshold that it had alone. Raises ValueError as
    `fold` does.
    """
    streams = max(fleet.streams, len({*fleet.named, *batches}))
    before = Fleet(streams, fleet.named)

    def folded(stream: int, factor: float) -> Folded:
        return Folded(*fold(config.times(factor), states[stream], batches[stream]), factor)

    found = _folded_alike(
        config, {stream: before.factor(stream) for stream in sorted(batches)}, states, batches
    )
    shares = dict(fleet.named)
    for stream, item in found.items():
        shares[stream] = _share(config, item, fleet.named.get(stream, 0.0))
    factor = step_up(list(shares.values()), streams)
    for stream, item in found.items():
        if factor is not None and shares[stream] >= factor and not _named(item):
            found[stream] = folded(stream, factor)
    return found


def _folded_alike(
    config: DetectorConfig,
    factors: Mapping[int, float],
    states: Mapping[int, StreamState],
    batches: Mapping[int, ObservationBatch],
) -> dict[int, Folded]:
    """Each stream with its A multiplied by its factor; those with one factor together."""
    found = {}
    for factor in set(factors.values()):
        own = [stream for stream, its in factors.items() if its == factor]
        folded = fold_many(
            config.times(factor), [states[stream] for stream in own], [batches[stream] for stream in own]
        )
        found.update({stream: Folded(*each, factor) for stream, each in zip(own, folded, strict=True)})
    return {stream: found[stream] for stream in factors}


def step_up(shares: Sequence[float], streams: int) -> float | None:
    """N / k* of e-BH; None where no stream is named."""
    ordered = np.sort(shares)[::-1]
    ranks = np.arange(1, len(ordered) + 1)
    passes = np.flatnonzero(ordered * ranks >= streams)
    return streams / int(ranks[passes[-1]]) if len(passes) else None


def evidence_share(config: DetectorConfig, state: StreamState) -> float:
    """f: the larger evidence of both directions, as a part of the stream's A."""
    evidence = np.vstack([state.stream_evidence, state.stratum_evidence])
    down, up = (mean_over_bets(evidence[:, lanes]).sum() / 2.0 for lanes in (DOWN, UP))
    return float(max(SHARES[0] * down, SHARES[1] * up)) / config.threshold(state.requests_per_day)


def _named(folded: Folded) -> bool:
    return any(incident is not None for incident in folded.state.incidents)


def _share(config: DetectorConfig, folded: Folded, named_with: float) -> float:
    """f at the end of a batch, from the f that the stream was named with before it (0 if it was not)."""
    now = evidence_share(config, folded.state)
    if not _named(folded):
        return now
    opened = any(isinstance(finding, DriftOpened) for finding in folded.findings)
    return max(now, folded.factor if opened else named_with)

"""Answer length: four buckets as strata, or a regression of x on log length? Prints the comparison.

One segment; log length ~ N(log 200, 1); x around a function of length, sd .12, correlation -.5 to -.7.
"step" is a relation that is not linear in log length: acceptance halves its excess around 150 tokens.
Columns: requests until 90% of the traffic is watched; median requests from a drop of .05 (.10) of
every request to the alarm; false alarms (falls or rises) in the 10,000 requests after lengths alone
shift by -1, +1 and +2 standard deviations of log length. A = 100,000. Run it as

    python -m tests.benchmarks.bench_length
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from driftguard.detection.statistics.bets import factors, mean_over_bets, running_sums

Floats = NDArray[np.float64]

EDGES = (64, 256, 1024)
SEED, RUNS = 7, 12
A, MINIMUM_DROP, IGNORE = 100_000.0, 0.05, 0.01
REFERENCE, AFTER = 3_000, 10_000  # requests before the change, and after it


def lengths(rng: np.random.Generator, n: int, shift: float) -> Floats:
    return np.exp(rng.normal(math.log(200.0) + shift, 1.0, n)).clip(1.0)


def acceptance(rng: np.random.Generator, length: Floats, correlation: float, *, step: bool) -> Floats:
    """x of each request: correlation of about the size asked for, residual sd .12."""
    slope = 0.12 * correlation / math.sqrt(1.0 - correlation**2)  # per standard deviation of log length
    place = np.log(length / 200.0)
    effect = 1.25 * np.tanh(2.0 * np.log(length / 150.0)) if step else place
    mean = np.clip(0.6 + slope * effect, 0.02, 0.98)
    precision = np.maximum(mean * (1.0 - mean) / 0.0144 - 1.0, 1.0)
    return rng.beta(mean * precision, (1.0 - mean) * precision)


def evidence(bets: Floats) -> Floats:
    """[T] after each of T bets [T, BETS]."""
    one = np.zeros(len(bets), dtype=np.intp)
    return mean_over_bets(running_sums(np.zeros((1, bets.shape[1])), one, bets))


class Watched:
    """The detector of one segment: `code` is each request's stratum, `line` its regressor."""

    def __init__(self, x: Floats, code: NDArray[np.int64], line: Floats) -> None:
        n, strata = len(x), int(code.max()) + 1
        self.expected, self.margin, self.variance = np.zeros(n), np.zeros(n), np.zeros(n)
        self.ready_at = np.full(strata, n)
        for stratum in range(strata):
            own = np.flatnonzero(code == stratum)
            self._learn(x[own], line[own], own, stratum)
        self.watched = np.arange(n) > self.ready_at[code]
        watched = np.flatnonzero(self.watched)
        share = self.watched[REFERENCE : REFERENCE + 1_000].mean()
        self.until_90 = self._until(code, 0.9) if share >= 0.9 else n
        alarms = [self._alarm(x, code, watched, rise=rise) for rise in (False, True)]
        self.alarm = min((at for at in alarms if at is not None), default=None)

    def _alarm(
        self, x: Floats, code: NDArray[np.int64], watched: NDArray[np.intp], *, rise: bool
    ) -> int | None:
        sign, margin = (-1.0 if rise else 1.0), self.margin[watched]
        boundary = np.clip(self.expected[watched] - sign * margin, 0.0, 1.0)
        bets = factors(x[watched], boundary, self.variance[watched], rise=rise)
        total = evidence(bets)
        for stratum in np.unique(code[watched]):
            own = code[watched] == stratum
            path = np.concatenate([[0.0], evidence(bets[own])])
            total += path[np.cumsum(own)]
        over = np.flatnonzero(total / 4.0 >= A)
        return int(watched[over[0]]) if len(over) else None

    def _learn(self, x: Floats, line: Floats, own: NDArray[np.intp], stratum: int) -> None:
        """Fits intercept and slope in a reference period of (8 sd / drop)^2 requests."""
        fits = bool(np.ptp(line) > 0) if len(line) else False
        size = 100
        while size <= len(x):
            slope = np.polyfit(line[:size], x[:size], 1)[0] if fits else 0.0
            middle = line[:size].mean()
            residual = x[:size] - x[:size].mean() - slope * (line[:size] - middle)
            variance = float(residual.var())
            needed = max(160, math.ceil((8.0 / MINIMUM_DROP) ** 2 * variance))
            if needed <= size:
                break
            size = needed
        else:
            return
        spread = max(float(((line[:size] - middle) ** 2).sum()), 1e-9)
        error = np.sqrt(variance * (1.0 / size + ((line - middle) ** 2 / spread if fits else 0.0)))
        expected = x[:size].mean() + slope * (line - middle)
        self.expected[own] = expected
        self.margin[own] = np.maximum(2.0 * error, IGNORE)
        self.variance[own] = variance
        self.ready_at[stratum] = own[size - 1]

    def _until(self, code: NDArray[np.int64], wanted: float) -> int:
        share = np.bincount(code, minlength=len(self.ready_at)) / len(code)
        order = np.argsort(self.ready_at)
        return int(self.ready_at[order][np.searchsorted(np.cumsum(share[order]), wanted)]) + 1


WAYS = ("none", "buckets", "regression")


def run(seed: int, way: str, correlation: float, *, step: bool, shift: float, drop: float) -> Watched:
    rng = np.random.default_rng([SEED, seed])
    length = np.concatenate([lengths(rng, REFERENCE, 0.0), lengths(rng, AFTER, shift)])
    x = acceptance(rng, length, correlation, step=step)
    x[REFERENCE:] = np.clip(x[REFERENCE:] - drop, 0.0, 1.0)
    code = np.digitize(length, EDGES) if way == "buckets" else np.zeros(len(x), dtype=np.int64)
    return Watched(x, code, np.log(length) if way == "regression" else np.zeros(len(x)))


def line_of(way: str, correlation: float, *, step: bool) -> str:
    delays = []
    until = 0.0
    for drop in (0.05, 0.10):
        found = [run(seed, way, correlation, step=step, shift=0.0, drop=drop) for seed in range(RUNS)]
        until = float(np.median([watched.until_90 for watched in found]))
        late = [one.alarm - REFERENCE for one in found if one.alarm is not None and one.alarm >= REFERENCE]
        delays.append(float(np.median(late)) if late else math.inf)
    false = []
    for shift in (-1.0, 1.0, 2.0):
        found = [run(seed, way, correlation, step=step, shift=shift, drop=0.0) for seed in range(RUNS)]
        false.append(sum(one.alarm is not None for one in found))
    relation = "step" if step else "line"
    return (
        f"{relation}  {correlation:+.1f}  {way:10s}  {until:6.0f}  {delays[0]:5.0f}  {delays[1]:5.0f}"
        f"  {false[0]:4d}  {false[1]:4d}  {false[2]:4d}"
    )


def main() -> None:
    print(f"seed {SEED}, {RUNS} runs")
    print("truth   r   way         until90   .05    .10  -1sd  +1sd  +2sd")
    for step in (False, True):
        for correlation in (-0.5, -0.7):
            for way in WAYS:
                print(line_of(way, correlation, step=step), flush=True)


if __name__ == "__main__":
    main()

"""What the times of requests tell: how fast they were, what a change cost, and seconds per step against K.

What a change cost compares the time per output token before and after, like compared with like.
A stratum is a segment at one band of concurrency. Both sides are taken in the mix of strata after the
change, T = sum over h of w_h x (mean time per output token in h), so neither a moved mix nor a fuller
server counts as a loss. Strata with fewer than LEAST_IN_STRATUM requests on either side are left out.

    lost = 1 - (1 / T_after) / (1 / T_before)

Its 95% interval comes from the logarithm of the ratio, whose variance is that of the strata's means by
runs of consecutive requests (`runs`), with Student's quantile. Assumption: those runs are
independent, which a machine that changes its speed for longer than a run breaks.

Seconds per step against K: t(K) = a + b K, and + s for every K > 0 where that can be told.

Least squares over requests, each weighted by its timed steps, in one band of concurrency: a step of a fuller
server takes longer at any K, so mixed bands would put the traffic's rush hours into b. Tokens emitted in a
step are left out: they differ by a few per step, all of them within the same forward pass.

What can be told depends on which K were seen (each in at least LEAST_REQUESTS requests):

    two different K > 0 and requests without speculation    a, b and s
    two different K > 0                                      a and b; t(0) = a is beyond what was measured
    one K > 0 and requests without speculation               a and b, a straight line through both
    anything less                                            nothing

Errors are those of runs of consecutive requests of one K (`runs`), so a K that does not lie on the
line widens them too. Assumption: requests of different K differ in nothing else that changes the time of a
step. Requests of all K are therefore taken from one day, and should come from the same hours of it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from driftguard.records.documents.cost import Interval, SeenK, StepTime

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
_Group = tuple[str, int] | None  # segment and K; None: all the small ones

BLOCKS: Final = 20
UNKNOWN_BAND: Final = -1
LEAST_REQUESTS: Final = 10  # below, nothing is said
LEVEL: Final = 0.95
SHORTEST: Final = 1e-9  # seconds per token; a time beyond these two was not measured
LONGEST: Final = 1e4


class TimedRequest(NamedTuple):
    """What a stored record tells about speed."""

    ended_at: float  # seconds since 1970 UTC
    segment: str
    num_speculative_tokens: int | None
    concurrency: int | None
    steps: int
    drafted: int
    accepted: int
    emitted: int
    accepted_per_position: Sequence[int] | None
    output_tokens: int | None
    time_per_output_token_seconds: float | None
    by_first: bool = False  # judged by its first position, because K varied: see driftguard.records.positions


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """N requests whose decoding was timed, oldest first; P drafted positions.

    `seconds` is what passed between the first output token and the last, `timed_steps` how many steps
    lie in that time. A server whose first token comes from reading the prompt emits output_tokens - 1
    in its steps, and all of them are timed; where the steps emitted every output token, the first step
    ended as the clock started. Where output_tokens is not told, all tokens are taken to be timed.
    """

    seconds_per_token: Floats  # [N]
    seconds: Floats  # [N]
    timed_steps: Floats  # [N], at least 1
    k: Ints  # [N] as configured, else drafted / steps rounded; 0 where nothing was drafted
    steps: Floats  # [N]
    drafted: Floats  # [N]
    accepted: Floats  # [N]
    emitted: Floats  # [N]
    positions: Floats  # [N, P] steps that accepted position i; NaN where the record does not tell
    band: Ints  # [N] of the concurrency: 1, 2, 3 to 4, 5 to 8, ... as 0, 1, 2, 3, ...; or UNKNOWN_BAND
    segment: NDArray[np.str_]  # [N]

    def __len__(self) -> int:
        return len(self.k)

    def __getitem__(self, chosen: Mask | slice) -> Sample:
        return Sample(*(getattr(self, field.name)[chosen] for field in fields(self)))


def sample_of(requests: Sequence[TimedRequest]) -> Sample:
    """Left out are requests without a time, with an absurd one, and of a single token."""
    timed = [(item, *_timed(item)) for item in sorted(requests, key=lambda item: item.ended_at)]
    kept = [(item, seconds, steps) for item, seconds, steps in timed if seconds > 0.0 and steps >= 1.0]
    items = [item for item, _, _ in kept]

    def column(name: str) -> Floats:
        return np.array([getattr(item, name) for item in items], dtype=np.float64)

    return Sample(
        seconds_per_token=column("time_per_output_token_seconds"),
        seconds=np.array([seconds for _, seconds, _ in kept], dtype=np.float64),
        timed_steps=np.array([steps for _, _, steps in kept], dtype=np.float64),
        k=np.array([k_of(item) for item in items], dtype=np.int64),
        steps=column("steps"),
        drafted=column("drafted"),
        accepted=column("accepted"),
        emitted=column("emitted"),
        positions=_positions(items),
        band=np.array([band_of(item.concurrency) for item in items], dtype=np.int64),
        segment=np.array([item.segment for item in items], dtype=np.str_),
    )


def measured(requests: Sequence[TimedRequest]) -> list[TimedRequest]:
    """Those of the segments and K whose times vary, in their order; groups of fewer than LEAST_REQUESTS with
    a time are judged together. One side of a change at a time: a constant may be set anew.

    A time that never varies was filled in, by a configuration or an estimate, and says of every change that
    it cost nothing. A clock that is read for each request never gives the same time ten times in a row,
    unless it is rounded so coarsely that it tells nothing about a loss either.
    """
    timed = [item for item in requests if item.time_per_output_token_seconds is not None]
    sizes = Counter((item.segment, k_of(item)) for item in timed)

    def group_of(item: TimedRequest) -> _Group:
        own = item.segment, k_of(item)
        return own if sizes[own] >= LEAST_REQUESTS else None

    times: dict[_Group, set[float | None]] = defaultdict(set)
    for item in timed:
        times[group_of(item)].add(item.time_per_output_token_seconds)
    in_group = Counter(group_of(item) for item in timed)
    constant = {group for group, found in times.items() if len(found) == 1 and in_group[group] > 1}
    return [item for item in requests if group_of(item) not in constant]


def _timed(request: TimedRequest) -> tuple[float, float]:
    """(seconds, steps) between the first output token and the last; (0, 0) where not known, or absurd."""
    per_token = request.time_per_output_token_seconds
    if per_token is None or not SHORTEST <= per_token <= LONGEST:
        return 0.0, 0.0
    told = request.output_tokens is not None
    tokens = request.output_tokens - 1 if request.output_tokens is not None else request.emitted
    if request.drafted == 0:
        return per_token * tokens, float(tokens)  # one token per step
    first_step_untimed = told and request.emitted > tokens
    return per_token * tokens, float(request.steps - first_step_untimed)


def k_of(request: TimedRequest) -> int:
    """As configured, else drafted / steps rounded; 0 where nothing was drafted."""
    if request.drafted == 0 or request.steps == 0:
        return 0
    if request.num_speculative_tokens:
        return request.num_speculative_tokens
    return max(1, round(request.drafted / request.steps))


def band_of(concurrency: int | None) -> int:
    """Number of the band: loads up to twice as high; UNKNOWN_BAND where it is not told."""
    return UNKNOWN_BAND if concurrency is None else max(concurrency - 1, 0).bit_length()


def concurrency_of(band: int) -> tuple[int, int] | None:
    """The fewest and the most requests at once in this band; None where the records do not tell."""
    if band == UNKNOWN_BAND:
        return None
    return (1, 1) if band == 0 else (2 ** (band - 1) + 1, 2**band)


def band_text(band: int) -> str:
    """For example: 1, 2, 9 to 16. Not of UNKNOWN_BAND."""
    return str(band + 1) if band <= 1 else f"{2 ** (band - 1) + 1} to {2**band}"


def _positions(requests: Sequence[TimedRequest]) -> Floats:
    width = max((len(item.accepted_per_position or ()) for item in requests), default=0)
    found = np.full((len(requests), width), np.nan)
    for row, item in zip(found, requests, strict=True):
        if item.accepted_per_position is not None:
            row[:] = 0.0
            row[: len(item.accepted_per_position)] = item.accepted_per_position
    return found


def runs(labels: Ints) -> Ints:
    """[N] A block for each request: the requests of one label, in order, cut into BLOCKS equal runs.

    Requests that run at the same time share the machine's state, so they are not independent; runs of
    them nearly are, as long as a run is longer than the machine's moods.
    """
    blocks = np.zeros(len(labels), dtype=np.int64)
    for number, label in enumerate(np.unique(labels)):
        places = np.flatnonzero(labels == label)
        count = min(BLOCKS, len(places))
        blocks[places] = number * BLOCKS + np.arange(len(places)) * count // len(places)
    return blocks


def one_label(count: int) -> Ints:
    return np.zeros(count, dtype=np.int64)


def variance(influence: Floats, blocks: Ints) -> float:
    """Of a statistic whose linear part is the sum of `influence` [N]: blocks count as independent."""
    names, places = np.unique(blocks, return_inverse=True)
    sums = np.bincount(places, weights=influence, minlength=len(names))
    return float((sums**2).sum()) * len(names) / (len(names) - 1)


def student(degrees: int, level: float) -> float:
    """Two-sided quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.5 + level / 2.0))


LEAST_IN_STRATUM: Final = 5


@dataclass(frozen=True, slots=True, eq=False)
class Matched:
    """Both sides of a change in common strata: each request's stratum, and each stratum's weight."""

    before: Sample
    after: Sample
    before_stratum: Ints  # [N_before]
    after_stratum: Ints  # [N_after]
    weight: Floats  # [H] share of the requests after


def matched(before: Sample, after: Sample) -> Matched | None:
    """None where too few requests have their like on the other side."""
    codes = {key: code for code, key in enumerate(sorted({*_keys(before), *_keys(after)}))}
    strata = [np.array([codes[key] for key in _keys(side)], dtype=np.int64) for side in (before, after)]
    counts = [np.bincount(side, minlength=len(codes)) for side in strata]
    common = np.flatnonzero(np.minimum(*counts) >= LEAST_IN_STRATUM)
    chosen: list[Mask] = [np.isin(side, common) for side in strata]
    if min(mask.sum() for mask in chosen) < LEAST_REQUESTS:
        return None
    after_count = counts[1][common].astype(np.float64)
    return Matched(
        before[chosen[0]],
        after[chosen[1]],
        np.searchsorted(common, strata[0][chosen[0]]),
        np.searchsorted(common, strata[1][chosen[1]]),
        after_count / after_count.sum(),
    )


def lost(pair: Matched) -> Interval:
    """Part of the tokens per second that was lost; negative where it was gained."""
    before, before_variance = _log_time(pair.before, pair.before_stratum, pair.weight)
    after, after_variance = _log_time(pair.after, pair.after_stratum, pair.weight)
    degrees = min(BLOCKS, len(pair.before), len(pair.after)) - 1
    half = student(degrees, LEVEL) * float(np.sqrt(before_variance + after_variance))
    change = before - after
    return Interval(*(float(-np.expm1(change + shift)) for shift in (0.0, half, -half)))


def standardised(numerator: Floats, denominator: Floats, stratum: Ints, weight: Floats) -> float:
    """Sum over strata of weight x (sum of numerator / sum of denominator)."""
    sums = [np.bincount(stratum, weights=part, minlength=len(weight)) for part in (numerator, denominator)]
    return float((weight * sums[0] / sums[1]).sum())


def _keys(sample: Sample) -> list[tuple[str, int]]:
    return list(zip(sample.segment.tolist(), sample.band.tolist(), strict=True))


def _log_time(sample: Sample, stratum: Ints, weight: Floats) -> tuple[float, float]:
    """Logarithm of the time per output token in the given mix, and its variance."""
    times = sample.seconds_per_token
    count = np.bincount(stratum, minlength=len(weight))
    mean = np.bincount(stratum, weights=times, minlength=len(weight)) / count
    total = float((weight * mean).sum())
    influence = (weight / count)[stratum] * (times - mean[stratum]) / total
    return float(np.log(total)), variance(influence, runs(one_label(len(stratum))))


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """A fitted t(K), with what each of the N requests contributes to the coefficients' error."""

    coefficients: Floats  # [C] a, b and s where it was told
    influence: Floats  # [N, C]
    blocks: Ints  # [N]
    ks: tuple[int, ...]  # seen, in order
    fewest: int  # requests of one K

    def terms(self, k: int) -> Floats:
        """[C] with t(K) = terms . coefficients."""
        return np.array([1.0, k, float(k > 0)])[: len(self.coefficients)]

    def at(self, k: int) -> float:
        return float(self.terms(k) @ self.coefficients)

    def log_influence(self, k: int) -> Floats:
        """[N] of log t(K)."""
        part: Floats = self.influence @ self.terms(k) / self.at(k)
        return part


def seen_ks(sample: Sample) -> tuple[SeenK, ...]:
    """In order of K; those of too few requests are not seen."""
    values, counts = np.unique(sample.k, return_counts=True)
    pairs = zip(values.tolist(), counts.tolist(), strict=True)
    return tuple(SeenK(value, count) for value, count in pairs if count >= LEAST_REQUESTS)


def fit(sample: Sample, seen: tuple[SeenK, ...]) -> Line | None:
    """None where the K that were seen do not tell."""
    ks = tuple(item.num_speculative_tokens for item in seen)
    if len(ks) < 2:
        return None
    sample = sample[np.isin(sample.k, ks)]
    k = sample.k.astype(np.float64)
    columns = [np.ones_like(k), k]
    if ks[0] == 0 and len(ks) > 2:
        columns.append((k > 0).astype(np.float64))
    design = np.stack(columns, axis=1)
    inverse = np.linalg.inv(design.T @ (design * sample.timed_steps[:, None]))
    coefficients = inverse @ (design.T @ sample.seconds)
    residual = sample.seconds - sample.timed_steps * (design @ coefficients)
    influence = (design * residual[:, None]) @ inverse
    return Line(coefficients, influence, runs(sample.k), ks, min(item.requests for item in seen))


def step_time(line: Line, seen: tuple[SeenK, ...]) -> StepTime:
    coefficients = line.coefficients.tolist()
    errors = [variance(column, line.blocks) ** 0.5 for column in line.influence.T]
    return StepTime(
        seconds=coefficients[0],
        seconds_error=errors[0],
        seconds_per_draft_token=coefficients[1],
        seconds_per_draft_token_error=errors[1],
        seconds_of_speculating=coefficients[2] if len(coefficients) > 2 else None,
        seen=seen,
    )

"""What a change cost: time per output token before and after, like compared with like.

A stratum is a segment at one band of concurrency. Both sides are taken in the mix of strata after the
change, T = sum over h of w_h x (mean time per output token in h), so neither a moved mix nor a fuller
server counts as a loss. Strata with fewer than LEAST_IN_STRATUM requests on either side are left out.

    lost = 1 - (1 / T_after) / (1 / T_before)

Its 95% interval comes from the logarithm of the ratio, whose variance is that of the strata's means by
runs of consecutive requests (`sample.runs`), with Student's quantile. Assumption: those runs are
independent, which a machine that changes its speed for longer than a run breaks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from driftguard.cost.sample import (
    BLOCKS,
    LEAST_REQUESTS,
    LEVEL,
    Floats,
    Ints,
    Mask,
    Sample,
    one_label,
    runs,
    student,
    variance,
)
from driftguard.records.documents.cost import Interval

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

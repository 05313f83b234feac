"""The state of a stream in the words of the status page, with the delay to expect of an alarm.

**Expected delay**: how many requests after a drop the alarm comes; about half of the alarms come sooner.
The best bet j grows by g_j = E log e_j per request after a drop of delta. With the threshold A, the margin
k of the safe baseline and the variance v, to second order g = max over lambda of lambda (delta - k) -
lambda^2 v / 2 = (delta - k)^2 / (2 v), and the alarm comes after about log A / g. Here g_j is exact for x
with a beta distribution of mean - delta and v (windows: a normal one), for the ten bets there are, with
what they have gained when the drop begins, and with all ten in the sum (`_delay`).

Assumptions: the true mean is the estimated one; v stays what it was; observations as dependent as was
measured. Requests of a session are taken as of sessions that begin after the drop; those open at the drop
show all of it, so where sessions last long and differ, the alarm comes sooner.
Measured with the real fold (tests/detection/test_summary.py, medians of 30 runs for drops of .05,
.10, .20, A = 1e4 and 1e6, latent sd .05, .12, .2): .86 to 1.15 of the simulated median; windows .83 to 1.0;
20 open sessions of 8 requests with half of the variance between them: 3.3 times it, drop .10.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import digamma

from driftguard.detection.config import DetectorConfig
from driftguard.detection.findings import (
    ExpectedDelay,
    Follows,
    NotWatched,
    SegmentSummary,
    SegmentVerdict,
    SessionsGiven,
    StreamSummary,
    Unit,
    Verdict,
)
from driftguard.detection.state.columns import SECONDS_PER_DAY, Columns, history_rows
from driftguard.detection.state.stream_state import OpenIncident, StreamState
from driftguard.detection.statistics.baseline import (
    FIRST_CHECK,
    REQUESTS,
    SESSIONS,
    Baselines,
    baselines,
    length_of_acceptance,
)
from driftguard.detection.statistics.bets import BETS, DOWN, SMALLEST_VARIANCE, Floats, factors
from driftguard.detection.statistics.factors import FACTORS
from driftguard.detection.steps.confirmation import wider_margin
from driftguard.detection.steps.dependence import is_young, known_inflation, of_stream_young_for, young_for
from driftguard.detection.steps.evidence import SHARES, watched_segments
from driftguard.detection.steps.expectation import (
    acceptance_over,
    at_baseline,
    baseline_of,
    change_shown,
    margin_of,
    request_variance,
    unseen_of,
)
from driftguard.detection.steps.reference_period import usual_windows_of
from driftguard.records.documents.acceptance import Acceptance

RECENT_REQUESTS = 200
PRESENT_REQUESTS = 50  # newest requests of a segment that say which of its strata is in use
STOPPED_AFTER = 100  # requests in a row without a drafted token, in a stream that drafted before


def describe(config: DetectorConfig, state: StreamState, factor: float = 1.0) -> StreamSummary:
    """What the detector would say now. Intervals are at 95% and do not correct for having been selected.

    `factor`: times A, for the delays to expect (`fleet.py`); what is promised of the stream stays the same.
    """
    rows = history_rows(state)
    base = baselines(state.reference, state.inflation, state.measured_at, state.of_windows)
    of_delays = config if factor == 1.0 else config.times(factor)
    segments = tuple(_segment(of_delays, state, base, rows, code) for code in range(len(state.names)))
    verdict, since = _verdict(state, rows, segments)
    opened = [incident for incident in state.incidents if incident is not None]
    return StreamSummary(
        verdict=verdict,
        since=since,
        ordinal=state.ordinal,
        requests=state.requests,
        undrafted=state.undrafted,
        requests_per_day=state.requests_per_day,
        false_alarm_every=config.threshold(state.requests_per_day),
        change_point=opened[0].change_point if opened else None,
        acceptance=_acceptance(state, rows[-RECENT_REQUESTS:]),
        segments=segments,
        sessions=_sessions_given(state),
        windows_after_gap=state.windows_after_gap,
        variance_inflation=float(state.inflation.max(initial=1.0)),
    )


def _sessions_given(state: StreamState) -> SessionsGiven:
    requests = int(state.drafted_requests[~state.of_windows].sum())
    if requests == 0:
        return "no requests"
    if state.in_session == 0:
        return "not given"
    return "given" if state.in_session >= requests else "in part"


def _verdict(
    state: StreamState, rows: Columns, segments: tuple[SegmentSummary, ...]
) -> tuple[Verdict, float | None]:
    down, up = state.incidents
    if state.undrafted_in_a_row >= STOPPED_AFTER and state.undrafted < state.requests:
        return "drafting_stopped", rows.ended_at(-1) if len(rows) else None
    if down is not None:
        return "degraded", down.change_point_ms / 1000.0
    if up is not None:
        return "improved", up.change_point_ms / 1000.0
    if any(segment.verdict in ("steady", "off_baseline") for segment in segments):
        return "steady", state.steady_since
    return "insufficient_data", state.first_ended_at if state.requests else None


def _segment(
    config: DetectorConfig, state: StreamState, base: Baselines, rows: Columns, code: int
) -> SegmentSummary:
    down, up = (incident if _concerns(incident, code) else None for incident in state.incidents)
    own = rows[np.flatnonzero(rows.segment == code)]
    newest = own[-RECENT_REQUESTS:]
    learning = None if down or up else _learning(state, newest[-PRESENT_REQUESTS:])
    incident = down or up
    recent = own[np.flatnonzero(own.ordinal >= incident.since_in(code))] if incident else newest
    watched = recent[np.flatnonzero(state.ready[recent.stratum])]
    newest_ready = state.newest_baseline(code)
    known = learning is None and newest_ready is not None
    strata = watched.stratum if len(watched) else np.array([newest_ready or 0])
    mean, deviation = _per_request(base, strata) if known else (None, None)
    baseline = _baseline(state, watched, strata) if known else None
    at_present = _acceptance(state, watched if len(watched) and known else recent)
    verdict: SegmentVerdict = (
        "degraded" if down else "improved" if up else _without_incident(baseline, at_present)
    )
    return SegmentSummary(
        segment=state.names[code],
        verdict=verdict,
        requests=int(state.drafted_requests[state.segment_of_stratum == code].sum()),
        requests_needed=_missing(config, state, code, learning),
        baseline=baseline,
        recent=at_present,
        mean_per_request=mean,
        standard_deviation=deviation,
        learning=None
        if learning is None
        else NotWatched(str(state.setting_of(learning)), state.why_learned(learning)),
        baseline_reason=state.why_learned(int(strata[state.ready_ordinal[strata].argmax()]))
        if known
        else None,
        expected_delays=expected_delays(config, state, base, rows, strata) if known else (),
        variance_inflation=float(state.inflation[strata].max()) if known else 1.0,
        known_inflation=known_inflation(state, strata) if known else None,
        follows=_follows(state, strata) if known else (),
        length_of_acceptance=known and bool(length_of_acceptance(state.reference[strata]).any()),
        alarm_waits=_alarm_waits(state, np.unique(strata)) if verdict == "off_baseline" else None,
        unit=_unit(state, state.segment_of_stratum == code),
    )


def _unit(state: StreamState, strata: NDArray[np.bool_]) -> Unit:
    return "windows" if state.of_windows[strata].any() else "requests"


def _alarm_waits(state: StreamState, strata: NDArray[np.integer]) -> int | None:
    """The stream looks again soon at an alarm that it has not confirmed."""
    if max(state.next_alarm) <= int(state.drafted_requests.sum()):
        return None
    return max(
        (of_stream_young_for(state, code) for code in strata.tolist() if is_young(state, code)), default=None
    )


def _follows(state: StreamState, strata: NDArray[np.integer]) -> tuple[Follows, ...]:
    """By the largest amplitude among these strata."""
    found = (
        Follows(factor.name, float(profile.amplitude[strata].max()))
        for factor, profile in zip(FACTORS, state.profiles, strict=True)
    )
    return tuple(one for one in found if one.by > 0.0)


def _without_incident(baseline: Acceptance | None, recent: Acceptance | None) -> SegmentVerdict:
    """ "steady" is not said against the numbers beside it."""
    if baseline is None:
        return "insufficient_data"
    if recent is not None and not recent.low <= baseline.rate <= recent.high:
        return "off_baseline"
    return "steady"


def _learning(state: StreamState, newest: Columns) -> int | None:
    """The stratum without a baseline that most of the segment's newest requests are in, if most are."""
    unwatched = newest.stratum[~state.ready[newest.stratum]]
    if 2 * len(unwatched) <= len(newest):
        return None
    return int(np.bincount(unwatched).argmax())


def _missing(config: DetectorConfig, state: StreamState, code: int, learning: int | None) -> int:
    if learning is not None:
        known, size = int(state.reference[learning, REQUESTS]), int(state.reference_size[learning])
        if state.of_windows[learning] and known > 0:
            size = max(size, usual_windows_of(config, state, learning))
        return max(size - known, 1)
    return FIRST_CHECK if state.newest_baseline(code) is None else 0  # nothing was drafted yet, or watched


def _baseline(state: StreamState, watched: Columns, strata: NDArray[np.integer[Any]]) -> Acceptance:
    """In the mix of the recent requests; of the newest baseline where the history holds none of them."""
    return at_baseline(state, watched) if len(watched) else baseline_of(state, int(strata[0]))


def _per_request(base: Baselines, strata: NDArray[np.integer[Any]]) -> tuple[float, float]:
    """Baseline mean per request in this mix of strata, and the deviation around it."""
    return float(base.mean[strata].mean()), float(np.sqrt(base.variance[strata].mean()))


def _concerns(incident: OpenIncident | None, code: int) -> bool:
    return incident is not None and code in incident.segments


def _acceptance(state: StreamState, rows: Columns) -> Acceptance | None:
    return acceptance_over(state, rows) if len(rows) else None


DROPS = (0.05, 0.10)
GRID = 512
CACHED = 16_384  # what they rest on stays the same while the baseline does; streams x segments x drops
_X: Floats = (np.arange(GRID) + 0.5) / GRID
_Z: Floats = np.linspace(-6.0, 6.0, GRID)
_NORMAL: Floats = np.exp(-_Z * _Z / 2.0) / np.exp(-_Z * _Z / 2.0).sum()


def expected_delays(
    config: DetectorConfig,
    state: StreamState,
    base: Baselines,
    rows: Columns,
    strata: NDArray[np.integer[Any]],
) -> tuple[ExpectedDelay, ...]:
    """For each of DROPS of one segment, whose newest watched requests are of these strata.

    Of the stratum of most of them, scaled up to all of the segment's requests by its share; `rows` (the
    history) give the segment's share of the stream's traffic.
    """
    code = int(np.bincount(strata).argmax())
    share = float((strata == code).mean())
    segment = float((rows.segment == state.segment_of_stratum[code]).mean())
    drafted = int(state.drafted_requests.sum()) / state.requests
    per_second = state.requests_per_day * drafted * segment / SECONDS_PER_DAY
    found = []
    for drop in DROPS:
        own = expected_requests(config, state, base, code, drop)
        requests = None if own is None else own / share
        seconds = None if requests is None or per_second == 0.0 else requests / per_second
        found.append(
            ExpectedDelay(drop, requests, seconds, _unit(state, np.arange(len(state.of_windows)) == code))
        )
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Watched:
    """What the delays of a stratum rest on."""

    mean: float  # acceptance per request
    variance: float  # of it, given the requests before
    fresh: float  # part of a drop that a typical request of a session shows
    shown: float  # the same in standard deviations, against the first request of a session
    cut_off: tuple[float, ...]  # b_j of the bets on a fall
    inflation: float  # how much more than independent ones its requests vary in the long run
    of_windows: bool


def expected_requests(
    config: DetectorConfig, state: StreamState, base: Baselines, code: int, drop: float
) -> float | None:
    """Of stratum `code`, which has a baseline: requests (windows) to the alarm if its mean falls by `drop`.

    None: not detectable, because the drop lies within the margin of the safe baseline or so little above
    it that no bet grows, or because a false alarm is to be expected sooner, or acceptance is no more than it.
    Of a young stratum it includes what its alarm waits for (`confirmation.py`).
    """
    threshold = config.threshold(state.requests_per_day)
    # evidence.py: an alarm needs the sum of the stratum, and that of the stream where both are the same.
    sums = 1.0 if len(state.setting_of_stratum) == 1 else 2.0
    needed = sums * threshold / SHARES[0] / _begin(state, code)
    of_factors = sum(float(profile.variance[code].mean()) for profile in state.profiles)
    error = math.sqrt(float(base.mean_error[code]) ** 2 + of_factors)
    errors = np.array(float(base.error_factor[code]) * error)
    margin = float(margin_of(errors, unseen_of(state, base)[code], config.ignore, state.of_windows[code]))
    fresh = _fresh(state, base, code)
    parts = base.within[code], base.between[code], np.array([fresh])
    watched = _Watched(
        mean=float(base.mean[code]),
        variance=request_variance(*parts).item(),
        fresh=fresh,
        shown=change_shown(*parts).item(),
        cut_off=tuple(state.cut_off[code, DOWN].tolist()),
        inflation=float(base.inflation[code]),
        of_windows=bool(state.of_windows[code]),
    )

    def until(margin: float) -> float:
        found = _until_alarm(watched, needed, margin, drop)
        return math.inf if found is None else found

    found = until(margin)
    if is_young(state, code):  # by its size, or by its age: confirmation.py
        wider = wider_margin(state, base, history_rows(state), code)
        found = min(until(margin + wider), max(found, young_for(state, code)))
    return found if found < threshold else None


def _begin(state: StreamState, code: int) -> float:
    """What is put on the bets that begin at a request of the stratum, on average (`evidence.py`)."""
    own = state.segment_of_stratum == state.segment_of_stratum[code]
    share = float(state.drafted_requests[own].sum() / state.drafted_requests.sum())
    return 1.0 / (float(watched_segments(state).sum()) * share)


def _fresh(state: StreamState, base: Baselines, code: int) -> float:
    """Part of a drop that a typical request of a session shows.

    Formula: the part f that has the mean information f_n^2 / (within + f_n between) of the requests
    n = 0, 1, .. of a session of mean size, f_n = within / (within + n between) (expectation.py).
    """
    within, between = float(base.within[code]), float(base.between[code])
    if between <= 0.0 or within <= 0.0:
        return 1.0
    size = math.ceil(state.reference[code, REQUESTS] / max(state.reference[code, SESSIONS], 1.0))
    of_each = within / (within + np.arange(size) * between)
    information = float(np.mean(of_each**2 / (within + of_each * between)))
    half = information * between / 2.0
    return min(half + math.sqrt(half * half + information * within), 1.0)


@lru_cache(maxsize=CACHED)
def _until_alarm(watched: _Watched, needed: float, margin: float, drop: float) -> float | None:
    """Requests (windows) until the sum of the bets on a fall is `needed`; see `_delay`."""
    mean, variance, fresh = watched.mean, watched.variance, watched.fresh
    if drop >= mean:
        return None
    x = mean + math.sqrt(variance) * _Z if watched.of_windows else _X
    fallen = x - drop if watched.of_windows else x

    def bets(at: Floats) -> Floats:
        boundary = np.full(GRID, max(mean - fresh * margin, 0.0))
        return factors(
            at,
            boundary,
            np.full(GRID, variance),
            rise=False,
            shown=np.full(GRID, watched.shown),
            cut=np.array(watched.cut_off),
            inflation=np.full(GRID, watched.inflation),
        )

    before = _NORMAL if watched.of_windows else _beta(mean, variance)
    after = _NORMAL if watched.of_windows else _beta(mean - fresh * drop, variance)
    return _delay(needed, bets(x), before, bets(fallen), after, watched.inflation)


def _beta(mean: float, variance: float) -> Floats:
    """Weights [GRID] of the beta distribution with this mean and variance, as far as there is one."""
    mean = min(max(mean, 1.0 / GRID), 1.0 - 1.0 / GRID)
    most = mean * (1.0 - mean)
    precision = most / min(max(variance, SMALLEST_VARIANCE), 0.9 * most) - 1.0
    logs = (mean * precision - 1.0) * np.log(_X) + ((1.0 - mean) * precision - 1.0) * np.log1p(-_X)
    weights = np.exp(logs - logs.max())
    total: Floats = weights / weights.sum()
    return total


def _delay(
    needed: float,
    before: Floats,
    weights_before: Floats,
    after: Floats,
    weights_after: Floats,
    inflation: float,
) -> float | None:
    """Requests until mean over bets R_j >= needed; the factors [GRID, BETS] of the bets with their weights.

    Formula: after t requests log R_j is about g_j t + c_j, with g_j = E log e_j after the drop and
    c_j = E log(1 + R + V), R the sum of the bets started before the drop and V = sum_i exp(-S_i) what
    those started after it add (Tartakovsky, Pollak, Polunchenko 2011, "Third-order asymptotic optimality
    of the generalized Shiryaev-Roberts changepoint detection procedures"). Both are perpetuities of
    random walks with drift g < 0 and g > 0; in the diffusion limit 2 / (s^2 Gamma(2 |g| / s^2)), s^2 the
    variance of log e_j (Dufresne 1990), so E log = log(2 / s^2) - digamma(2 |g| / s^2). Of dependent
    observations s^2 is `inflation` times as large.
    """
    log_before, log_after = np.log(before), np.log(after)
    growth, spread = _moments(log_after, weights_after, inflation)
    growing = growth > 0.0
    if not growing.any():
        return None
    started = np.logaddexp(
        _perpetuity(*_moments(log_before, weights_before, inflation)), _perpetuity(growth, spread)
    )
    growth, spread, started = growth[growing], spread[growing], np.logaddexp(0.0, started)[growing]
    level = math.log(needed * BETS)
    t = float(((level - started) / growth).min())
    for _ in range(20):  # Newton; the sum is convex in t and t is at or above its root
        logs = started + growth * t
        weights = np.exp(logs - logs.max())
        total = float(logs.max() + math.log(weights.sum()))
        t -= (total - level) / float((weights * growth).sum() / weights.sum())
    best = int(weights.argmax())
    shape = max(level - started[best], 1.0) * growth[best] / spread[best]
    return max(t / math.sqrt(1.0 + 1.0 / shape), 1.0)


def _moments(logs: Floats, weights: Floats, inflation: float) -> tuple[Floats, Floats]:
    """Mean and long-run variance [BETS] of log e_j [GRID, BETS]."""
    mean = weights @ logs
    return mean, inflation * (weights @ (logs - mean) ** 2)


def _perpetuity(growth: Floats, spread: Floats) -> Floats:
    """E log of the perpetuity [BETS]. Below 1 (a stake too large for the drop) the perpetuity has no mean,
    and takes longer than the delay to build up: taken as 1."""
    return np.log(2.0 / spread) - digamma(np.maximum(2.0 * np.abs(growth) / spread, 1.0))

"""The reference period of a stratum, and the baseline that it gives.

Sums over the reference period are kept per stratum [.., SUMS]; their order is fixed here.

Baselines and what is compared with them are acceptance rates with an interval that allows for requests that
differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from driftguard.detection.statistics.long_run_variance import OF_REQUESTS, OF_WINDOWS
from driftguard.records.documents.acceptance import Acceptance
from driftguard.records.positions import Positions

Floats = NDArray[np.float64]

# Places of the sums: requests, x, x^2, drafted d, accepted a, d^2, d a, a^2, log length l, l^2, l x;
REQUESTS, X, XX, D, A, DD, DA, AA, L, LL, LX = range(11)
# over sessions s (sessions.py): how many, sum X_s^2 / n_s, sum X_s L_s / n_s, sum L_s^2 / n_s, sum n_s^2;
SESSIONS, SXX, SXL, SLL, SNN = range(11, 16)
NAMED = 16  # requests that name their session
SUMS = 17
FIRST_CHECK = 100  # requests after which the spread is first estimated
SIZE_FACTOR = 8.0  # a reference of (8 sd / drop)^2 requests puts two standard errors at a quarter of the drop
TWO_ERRORS_LEVEL = 0.97725  # of a normal distribution below two standard errors
NEARLY_ALL = 0.95  # of the requests name their session: then sessions say what belongs together
LEAST_REPEATS = 10  # requests beyond each session's first, before sessions tell anything
USUAL_SECONDS = 3_600.0
USUAL_SPREAD = 0.13  # of acceptance between requests
USUAL_TOKENS = 230.0  # drafted for a request: an answer of 200 tokens at K = 4 of which 60% are accepted
SMALLEST_LENGTH_SPREAD = 0.05  # sd of log length below which lengths are all alike
OF_ACCEPTANCE = 0.5  # of the variance of x and of l: from there on they are taken to be one number


@dataclass(frozen=True, slots=True)
class Baselines:
    """Of C strata with x = accepted / drafted per request and l = log length."""

    mean: Floats  # of x
    slope: Floats  # of x on l; 0 where lengths are not known, all alike or follow from x
    middle: Floats  # mean of l
    variance: Floats  # of x around the line: within + between
    within: Floats  # variance inside a session
    between: Floats  # variance of the sessions' own means; 0 where sessions are not given or all alike
    inflation: Floats  # f of long_run_variance.py in bets; 1 where observations are independent
    mean_error: Floats  # standard error of the mean, clustered by session and inflated
    error_factor: Floats  # how many standard errors make the margin
    slope_error: Floats
    unseen: Floats  # part of the margin: how far the mean may wander that has not been seen to


def terms(
    x: Floats,
    log_length: Floats,
    drafted: NDArray[np.int64],
    accepted: NDArray[np.int64],
    session_before: Floats,
    named: NDArray[np.bool_],
) -> Floats:
    """What each of T requests adds to the sums: [T, SUMS]. `session_before` [T, KNOWN] as in sessions.py;
    `named` [T]: the request names its session."""
    d, a, line = drafted.astype(np.float64), accepted.astype(np.float64), log_length
    own = [np.ones_like(x), x, x * x, d, a, d * d, d * a, a * a, line, line * line, line * x]
    return np.hstack([np.stack(own, axis=1), _cluster_terms(session_before, x, line), named[:, None]])


def _cluster_terms(before: Floats, x: Floats, line: Floats) -> Floats:
    """What each request adds to the sums over sessions s of a reference period [T, 5].

    The number of sessions, sum X_s^2 / n_s, sum X_s L_s / n_s, sum L_s^2 / n_s and sum n_s^2, with X_s
    and L_s the session's sums of x and of log length; a request without a session is one of its own.
    """
    n, old_x, old_l = before[:, 0], before[:, 1], before[:, 2]
    new_x, new_l, least = old_x + x, old_l + line, np.maximum(n, 1.0)
    return np.stack(
        [
            (n == 0.0).astype(np.float64),
            new_x * new_x / (n + 1.0) - old_x * old_x / least,
            new_x * new_l / (n + 1.0) - old_x * old_l / least,
            new_l * new_l / (n + 1.0) - old_l * old_l / least,
            2.0 * n + 1.0,
        ],
        axis=1,
    )


def add_terms(sums: Floats, added: Floats) -> Floats:
    """sums [SUMS] + each of added [T, SUMS], one after the other, so that batching changes no bit."""
    total: Floats = np.add.accumulate(np.vstack([sums, added]), axis=0)[-1]
    return total


Line = tuple[Floats, Floats, Floats]  # see `_line`


def _line(sums: Floats) -> Line:
    """(slope, sum of squares of l around its mean, sum of squares of x around the line) from [..., SUMS].

    The slope is 0, and the middle sum 0, where lengths are all alike or follow from acceptance.
    """
    n, lengths, both = np.maximum(sums[..., REQUESTS], 1.0), _squares_of_length(sums), _products(sums)
    tell = (lengths > SMALLEST_LENGTH_SPREAD**2 * n) & ~_follows_from_acceptance(sums, lengths, both)
    slope = np.where(tell, both / np.where(tell, lengths, 1.0), 0.0)
    squares = sums[..., XX] - sums[..., X] ** 2 / n - slope * both
    return slope, np.where(tell, lengths, 0.0), np.maximum(squares, 0.0)


def length_of_acceptance(sums: Floats) -> NDArray[np.bool_]:
    """Are answers longer because more was accepted, and for hardly any other reason? From [..., SUMS].

    A step emits what it accepts and one token more, so that l = log d + log(1/K + x) for d drafted tokens. Of
    requests of equally many steps, the length is a function of x: a line through both would explain every
    fall away, and beyond the reference period it even shows a fall as a rise. So it is where lengths and x
    rise together with r^2 >= 1/2 and d does not vary enough to be why the lengths do. Where d varies more (a
    standard deviation of log d above some .13), a line hides less than half of a fall.
    """
    return _follows_from_acceptance(sums, _squares_of_length(sums), _products(sums))


def _follows_from_acceptance(sums: Floats, lengths: Floats, both: Floats) -> NDArray[np.bool_]:
    n = np.maximum(sums[..., REQUESTS], 1.0)
    squares = np.maximum(sums[..., XX] - sums[..., X] ** 2 / n, 0.0)
    drafted = np.maximum(sums[..., DD] - sums[..., D] ** 2 / n, 0.0)
    alike = drafted * n**2 <= (1.0 - OF_ACCEPTANCE) * lengths * sums[..., D] ** 2
    rises: NDArray[np.bool_] = (both > 0.0) & (both**2 >= OF_ACCEPTANCE * lengths * squares)
    differ: NDArray[np.bool_] = lengths > SMALLEST_LENGTH_SPREAD**2 * n
    return np.asarray(differ & rises & alike)


def _squares_of_length(sums: Floats) -> Floats:
    n = np.maximum(sums[..., REQUESTS], 1.0)
    return np.asarray(np.maximum(sums[..., LL] - sums[..., L] ** 2 / n, 0.0))


def _products(sums: Floats) -> Floats:
    """Sum of (x - its mean) (l - its mean)."""
    return np.asarray(sums[..., LX] - sums[..., L] * sums[..., X] / np.maximum(sums[..., REQUESTS], 1.0))


def variance_of(sums: Floats) -> Floats:
    """Variance of x between requests around the line, from sums [..., SUMS]; 0 where n is too small."""
    return _variance_around(_line(sums), sums)


def _variance_around(line: Line, sums: Floats) -> Floats:
    _, lengths, squares = line
    freedom = sums[..., REQUESTS] - 1.0 - (lengths > 0.0)
    return np.where(freedom >= 1.0, squares / np.maximum(freedom, 1.0), 0.0)


def _tells(sums: Floats) -> NDArray[np.bool_]:
    """Are there sessions with enough repeats to tell how much they differ?"""
    sessions = sums[..., SESSIONS]
    tells: NDArray[np.bool_] = (sums[..., REQUESTS] - sessions >= LEAST_REPEATS) & (sessions >= 2.0)
    return tells


def _components(line: Line, sums: Floats) -> tuple[Floats, Floats]:
    """(within, between): one-way random effects by moments (analysis of variance), from [..., SUMS].

    within = (sum r^2 - sum R_s^2 / n_s) / (n - k); between = (sum R_s^2 / n_s / (k - 1) - within) / n_0,
    n_0 = (n - sum n_s^2 / n) / (k - 1), for residuals r around the line and their sums R_s over k
    sessions. With fewer than LEAST_REPEATS repeats, or one session, all variance is within.
    Paper: Searle, Casella, McCulloch, Variance Components (1992), section 3.6.
    """
    n, x, length = np.maximum(sums[..., REQUESTS], 1.0), sums[..., X], sums[..., L]
    slope, _, squares = line
    tells = _tells(sums)
    start = (x - slope * length) / n
    sessions, sxx, sxl, sll, sizes = (sums[..., place] for place in (SESSIONS, SXX, SXL, SLL, SNN))
    of_sessions = sxx + start**2 * n + slope**2 * sll - 2.0 * start * x - 2.0 * slope * sxl
    of_sessions = np.clip(of_sessions + 2.0 * start * slope * length, 0.0, squares)
    more = np.maximum(sessions - 1.0, 1.0)
    alone = _variance_around(line, sums)
    within = np.where(tells, (squares - of_sessions) / np.maximum(n - sessions, 1.0), alone)
    size = np.where(tells, (n - sizes / n) / more, 1.0)
    between = np.where(tells, np.maximum(of_sessions / more - within, 0.0) / np.maximum(size, 1.0), 0.0)
    return within, between


def _mean_variance(sums: Floats, inflation: Floats, within: Floats, between: Floats) -> Floats:
    """n x the variance of the mean of n requests: f (within + between sum n_s^2 / n)."""
    by_session = within + between * sums[..., SNN] / np.maximum(sums[..., REQUESTS], 1.0)
    return np.asarray(inflation * by_session)


def sessions_tell(sums: Floats) -> bool:
    """Do sessions that repeat, and that nearly all requests name, say what belongs together? From [SUMS]."""
    return bool(_tells(sums) and sums[NAMED] >= NEARLY_ALL * sums[REQUESTS])


def line_of(sums: Floats) -> tuple[float, float, float]:
    """(mean, slope, middle) of the line of x on log length, from [SUMS] with n >= 1."""
    slope, _, _ = _line(sums)
    return float(sums[X] / sums[REQUESTS]), float(slope), float(sums[L] / sums[REQUESTS])


def needed_requests(sums: Floats, minimum_drop: float) -> int:
    """Size of the reference period, from the spread seen so far (sums [SUMS]).

    n = (8 sd / minimum_drop)^2 with sd^2 / n the variance of the mean (many requests of one session tell
    little more than one), at least 8 / minimum_drop and at least FIRST_CHECK. The floor is the
    same rule for sd^2 = 1/n, the spread that n equal requests cannot exclude. What dependence adds is left
    to the margin, and to the reference period that grows. The size looks at the spread only, never at the
    mean, so stopping there does not select a flattering mean.
    """
    spread = SIZE_FACTOR / minimum_drop
    wanted = spread**2 * float(_mean_variance(sums, np.ones(()), *_components(_line(sums), sums)))
    return max(FIRST_CHECK, math.ceil(spread), math.ceil(wanted))


def usual_windows(sums: Floats, ended_at: Floats, minimum_drop: float) -> int:
    """How many windows like these, sums [SUMS] of n >= 2 that ended at [T] seconds, are long enough to be
    usual: an hour of them, or, on a busy server, the draft tokens that a reference period of requests has.

    An hour by what lies between most of them, so that no time without windows and no jump of a clock counts.
    """
    requests = max((SIZE_FACTOR * USUAL_SPREAD / minimum_drop) ** 2, float(FIRST_CHECK))
    by_tokens = requests * USUAL_TOKENS / float(sums[D]) * float(sums[REQUESTS])
    apart = max(float(np.median(np.diff(ended_at))), 1.0)
    return math.ceil(min(by_tokens, USUAL_SECONDS / apart))


def baselines(
    sums: Floats, inflation: Floats, seen: NDArray[np.int64], of_windows: NDArray[np.bool_]
) -> Baselines:
    """From reference sums [C, SUMS] of complete reference periods and the inflation f of each [C],
    which `seen` observations [C] could show.

    Formula: x = mean + slope (l - middle) by least squares, l the logarithm of output_tokens; variance v
    around that line, its parts within and between sessions (_components); standard errors
    sqrt(max(v', 1/n) / n) of the mean, v' = f (within + between sum n_s^2 / n), and
    sqrt(v / sum (l - middle)^2) of the slope. v is the variance between requests, not binomial, which is
    wrong by a factor of 2 to 40. Where sessions differ, or f is above 1, the two standard errors of the
    margin become the Student quantile of as many sessions, or of n / f observations, at the same level. A
    window is a mean of many requests: its 1/n is WINDOW_DEVIATION^2.
    Assumptions: sessions (requests, where none are given) of the reference period are independent, or as
    dependent as f says, and in control; acceptance is linear in log length.
    Against four buckets of length as strata (tests/benchmarks/bench_length.py: sd .12, correlation -.5
    and -.7) the line needs a seventh of the requests until 90% of the traffic is watched (about 400
    against 3,000), finds a drop of .05 or .10 as soon, and raises a false alarm in 0 to 1 of 12 runs
    where lengths shift by one or two standard deviations (buckets: 1 to 12 of 12, because the lengths
    shift inside a bucket too). Where the true relation is a step, neither holds at a shift of two.
    """
    n = np.maximum(sums[..., REQUESTS], 1.0)
    slope, lengths, _ = line = _line(sums)
    variance = _variance_around(line, sums)
    with_spread = lengths > 0.0
    slope_error = np.where(
        with_spread, np.sqrt(inflation * variance / np.where(with_spread, lengths, 1.0)), 0.0
    )
    within, between = _components(line, sums)
    sessions = np.where(between > 0.0, sums[..., SESSIONS], n)
    freedom = np.maximum(sessions / inflation - 1.0, 1.0)
    least = np.where(of_windows, WINDOW_DEVIATION**2, 1.0 / n)
    mean_variance = _mean_variance(sums, inflation, within, between)
    return Baselines(
        mean=sums[..., X] / n,
        slope=slope,
        middle=sums[..., L] / n,
        variance=within + between,
        within=within,
        between=between,
        inflation=np.asarray(inflation * _doubt(seen, of_windows)),
        mean_error=np.sqrt(np.maximum(mean_variance, least) / n),
        error_factor=_error_factor(of_windows | (inflation > 1.0) | (between > 0.0), freedom),
        slope_error=slope_error,
        unseen=np.sqrt(within + between) * _of_caution("deviations", of_windows) / np.maximum(seen, 1),
    )


def _doubt(seen: NDArray[np.int64], of_windows: NDArray[np.bool_]) -> Floats:
    """[C] what f is multiplied by in bets: 1 + (early / n)^3 after n observations."""
    return np.asarray(1.0 + (_of_caution("early", of_windows) / np.maximum(seen, 1)) ** 3)


def _of_caution(name: str, of_windows: NDArray[np.bool_]) -> Floats:
    """[C] what is said of requests or of windows."""
    return np.asarray(np.where(of_windows, getattr(OF_WINDOWS, name), getattr(OF_REQUESTS, name)))


def _error_factor(by_student: NDArray[np.bool_], freedom: Floats) -> Floats:
    factor = np.full(np.shape(freedom), 2.0)
    return np.asarray(stdtrit(freedom, TWO_ERRORS_LEVEL, out=factor, where=by_student))


def reference_acceptance(
    sums: Floats, *, of_windows: bool = False, positions: Positions = "all"
) -> Acceptance:
    """Acceptance rate of one reference period, from its sums [SUMS] with n >= 1."""
    n, drafted, accepted, drafted2, both, accepted2 = sums[[REQUESTS, D, A, DD, DA, AA]].tolist()
    return acceptance_from_sums(
        n, drafted, accepted, drafted2, both, accepted2, of_windows=of_windows, positions=positions
    )


LEVEL = 0.95
WINDOW_DEVIATION = 0.01


def acceptance_of(
    drafted: NDArray[np.int64],
    accepted: NDArray[np.int64],
    *,
    of_windows: bool = False,
    positions: Positions = "all",
) -> Acceptance:
    """Of n >= 1 requests (or windows), each with drafted > 0."""
    d, a = drafted.astype(np.float64), accepted.astype(np.float64)
    sums = (float(column.sum()) for column in (d, a, d * d, d * a, a * a))
    return acceptance_from_sums(len(d), *sums, of_windows=of_windows, positions=positions)


def acceptance_from_sums(
    requests: float,
    drafted: float,
    accepted: float,
    drafted2: float,
    both: float,
    accepted2: float,
    *,
    of_windows: bool = False,
    positions: Positions = "all",
) -> Acceptance:
    """From sums over n requests of d, a, d^2, d a and a^2.

    Formula: rate r = sum a / sum d; interval r +- t se with the linearised (delta method) standard
    error of a ratio of sums, se = sqrt(n s^2) / sum d, s^2 = sum (a - r d)^2 / (n - 1), t the Student
    quantile of n - 1 degrees of freedom. Requests are the units, never tokens: the binomial error of
    tokens is too small by a factor of 2 to 40. se is at least 1/n, because n requests cannot exclude
    that one in n behaves differently; a window is a mean of many, with a deviation of at least .01.
    Assumptions: independent requests; n of a few dozen or more for the level to hold well.
    Paper: Cochran, Sampling Techniques (1977), section 6.3.
    """
    rate = accepted / drafted
    if requests < 2:
        return Acceptance(rate, 0.0, 1.0, int(requests), positions)
    squares = max(accepted2 - 2.0 * rate * both + rate * rate * drafted2, 0.0)
    error = math.sqrt(requests * squares / (requests - 1)) / drafted
    least = WINDOW_DEVIATION / math.sqrt(requests) if of_windows else 1.0 / requests
    half = float(stdtrit(requests - 1, 0.5 + LEVEL / 2)) * max(error, least)
    return Acceptance(rate, max(rate - half, 0.0), min(rate + half, 1.0), int(requests), positions)

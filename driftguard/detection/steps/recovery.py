"""Is a reported change over? A test that each changed segment has come back past the midpoint.

For a fall, the null says that the segment's acceptance per request still lies at or below the
midpoint between before and after. Bets that it lies above are e = 1 + lambda (x - midpoint); a share
w_t (`driftguard.alpha_spending`) of one unit of wealth is put on bets that begin at the segment's
t-th request after the alarm: W_t = (W_{t-1} + w_t) e_t, averaged over the ten bets of `bets.py`.
Recovered when the average reaches 1 / RECOVERY_LEVEL.

Assumptions: E[x | past] <= midpoint while it has not recovered; nothing else about x. So no request is cut:
`cut_off` makes up for the reference period's requests, and after a change of some requests only, more lie
beyond the reach than before it. Windows, means of many requests, are cut as ever.
Guarantee: the shares sum to less than 1, so W is at most a mixture of nonnegative supermartingales, and
the probability that an unrecovered segment is ever called recovered is at most RECOVERY_LEVEL
(Ville's inequality). A segment leaves its incident when it has recovered, and is watched again: one that
was called so by mistake raises its alarm anew. An incident closes when every changed segment has
recovered, so the level holds for it without correction (the rejections are intersected). The price of the
shares is a delay that grows with the logarithm of the incident's length.

Paper: Ramdas, Grunwald, Vovk, Shafer 2023, "Game-theoretic statistics and safe anytime-valid inference".

**Segments of an alarm that came from the stream as a whole** are tested in common as well: what breaks all at
once is mostly mended at once, and all together show it sooner. The guarantee is then that of their requests
together. Of these segments those stay whose own requests since the common return lie, on average, on the
fallen side of their own midpoint, or have other settings: no level, but one that sends too little to tell is
watched again, and one that is still fallen raises its alarm anew.

**The midpoint** is known no better than the distance between before and after. At the alarm few requests tell
that, and the worst ones at that: where some requests fall and others do not, twice the true distance is
likely. So half of a lower bound is taken (`evidence.halfway_at_least`), the largest that any number of
requests since the alarm gave: it grows towards half the distance while the change lasts, and requests after
its end do not lower it. Each request is bet on by what those before it told. Two requests that did not change
(UNTOLD) are counted with them: the first few may be alike by chance.

A rise is the mirror image. A segment that sends nothing while the stream sends a whole history of requests no
longer holds the incident open; where it sends again while others do, its test goes on. Requests with settings
that have no baseline from before the alarm (another K, another temperature) cannot tell whether a fall is
over, but they are no silence: the fall may go on in them. A rise, which nobody has to mend, ends where none
of its settings is left.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from driftguard import alpha_spending
from driftguard.detection.findings import DriftClosed, SegmentChange
from driftguard.detection.state.columns import Columns
from driftguard.detection.state.stream_state import (
    ALONE,
    DIRECTIONS,
    RECOVERED,
    SILENT,
    WAITING,
    OpenIncident,
    StreamState,
)
from driftguard.detection.statistics.baseline import Baselines
from driftguard.detection.statistics.bets import NOT_CUT, Floats, mean_over_bets, running_sums
from driftguard.detection.statistics.change_point import likeliest_point
from driftguard.detection.steps.evidence import SMALLEST_WEIGHT, bets_against, halfway_at_least
from driftguard.detection.steps.expectation import acceptance_over, at_baseline

RECOVERY_LEVEL = 0.01


@dataclass(frozen=True, slots=True)
class RecoveryRun:
    """One recovery test over the T requests of a step: its n requests and the wealth after each. `heard`:
    those that show that its segments are not silent."""

    places: NDArray[np.intp]  # [n] among the T
    path: Floats  # [n, BETS]
    told: Floats  # [n, 4] of the distance, after each
    halfway: Floats  # [n] after each
    heard: NDArray[np.intp]  # [m] among the T, m >= n
    was_silent: bool

    def first_decided(self) -> int | None:
        """Place among the T requests at which the test is decided, if it is."""
        decided = mean_over_bets(self.path) >= 1.0 / RECOVERY_LEVEL
        return int(self.places[decided.argmax()]) if decided.any() else None

    def first_event(self) -> int | None:
        """The same, or the place at which its segments send again after a silence."""
        return int(self.heard[0]) if self.was_silent and len(self.heard) else self.first_decided()


def midpoint(rows: Columns, halfway: Floats, *, fall: bool) -> Floats:
    """What each request is expected to accept halfway between before and after [T]."""
    sign = -1.0 if fall else 1.0
    return np.clip(rows.expected + sign * rows.fresh * halfway, 0.0, 1.0)


def recovery_bets(
    state: StreamState, base: Baselines, rows: Columns, halfway: Floats, *, fall: bool
) -> Floats:
    """e [T, BETS] against "not back past the midpoint yet"; `halfway` [T]."""
    middle = midpoint(rows, halfway, fall=fall)
    uncut = np.where(state.of_windows[:, None], state.cut_off, NOT_CUT)
    return bets_against(replace(state, cut_off=uncut), base, rows, middle, rise=fall)


def run_tests(
    state: StreamState, incident: OpenIncident, base: Baselines, rows: Columns, *, fall: bool
) -> dict[int, RecoveryRun]:
    """Every undecided test of the incident over the requests of a step, and those of silent segments.

    Strata whose baseline was learned after their segment's alarm cannot tell whether the change is over.
    """
    comparable = _comparable(state, incident)[rows.stratum]
    runs = {}
    for test in np.flatnonzero(incident.outcome != RECOVERED).tolist():
        heard = np.isin(rows.segment, incident.segments[incident.members(test)])
        places = np.flatnonzero(heard & comparable)
        own = rows[places]
        known = incident.halfway[test : test + 1]
        told, least = halfway_at_least(state, base, own, incident.told[test], rise=not fall)
        halfway = np.maximum.accumulate(np.concatenate([known, least]))
        bets = recovery_bets(state, base, own, halfway[: len(own)], fall=fall)
        one = np.zeros(len(own), dtype=np.intp)
        shares = np.array([alpha_spending.share(int(incident.seen[test]) + n) for n in range(len(own))])
        path = running_sums(incident.wealth[test][None], one, bets, shares)
        seen = np.flatnonzero(heard) if fall else places
        was_silent = bool(incident.outcome[test] == SILENT)
        runs[test] = RecoveryRun(places, path, told, halfway[1:], seen, was_silent)
    return runs


def _comparable(state: StreamState, incident: OpenIncident) -> NDArray[np.bool_]:
    """Which strata [C] tell whether the change is over."""
    known: NDArray[np.bool_] = state.ready & (
        state.ready_ordinal <= _alarms(state, incident)[state.segment_of_stratum]
    )
    return known


def _alarms(state: StreamState, incident: OpenIncident) -> NDArray[np.int64]:
    """The ordinal of the alarm of each of the stream's segments [S], 0 of those that it has none of."""
    alarm = np.zeros(len(state.names), dtype=np.int64)
    alarm[incident.segments] = incident.alarm_ordinal
    return alarm


def keep_tests(
    incident: OpenIncident, runs: dict[int, RecoveryRun], stop: int, before: int, history: int
) -> OpenIncident:
    """The incident after the first `stop` requests of the step, which follow `before` earlier ones."""
    wealth, seen = incident.wealth.copy(), incident.seen.copy()
    told, halfway = incident.told.copy(), incident.halfway.copy()
    last_seen, outcome = incident.last_seen.copy(), incident.outcome.copy()
    for test, run in runs.items():
        done = int(np.searchsorted(run.places, stop))
        if done:
            wealth[test] = run.path[done - 1]
            seen[test] += done
            told[test] = run.told[done - 1]
            halfway[test] = run.halfway[done - 1]
        if known := int(np.searchsorted(run.heard, stop)):
            last_seen[test] = before + run.heard[known - 1] + 1
            outcome[test] = WAITING
        if run.first_decided() == stop - 1:
            outcome[test] = RECOVERED
        elif before + stop - last_seen[test] >= history:
            outcome[test] = SILENT
    return replace(
        incident, wealth=wealth, seen=seen, told=told, halfway=halfway, last_seen=last_seen, outcome=outcome
    )


def back_together(
    state: StreamState, base: Baselines, rows: Columns, incident: OpenIncident, direction: int
) -> OpenIncident:
    """The incident in which what a common test says to be back is so by its own test too, but for segments
    whose own requests since then say otherwise, by `rows` (the history as columns)."""
    outcome = incident.outcome.copy()
    for test in np.unique(incident.common[incident.common != ALONE]).tolist():
        if incident.outcome[test] == RECOVERED:
            not_back = _not_back(state, base, rows, incident, test, direction)
            outcome[incident.test[(incident.common == test) & ~not_back]] = RECOVERED
    return replace(incident, outcome=outcome).without_common(incident.outcome == RECOVERED)


def _not_back(
    state: StreamState, base: Baselines, rows: Columns, incident: OpenIncident, test: int, direction: int
) -> NDArray[np.bool_]:
    """Which of the segments [D] of a common test accept, since all of them together came back, on average
    less (after a rise: more) than halfway between before and after: by its lower bound, or, where that is
    further, as far as their requests from the change until then lay off on average. In a fall also those
    that have sent with other settings only since then, which do not tell."""
    codes, segments, fall = incident.segments, len(state.names), direction == 0
    heard = rows[np.flatnonzero(np.isin(rows.segment, codes[incident.common == test]))]
    heard = heard[np.flatnonzero(heard.ordinal >= incident.since(segments)[heard.segment])]
    own = heard[np.flatnonzero(_comparable(state, incident)[heard.stratum])]
    later = np.flatnonzero(own.ordinal > _alarms(state, incident)[own.segment])
    halfway = np.full(len(later), incident.halfway[test])
    begun = later[likeliest_point(recovery_bets(state, base, own[later], halfway, fall=fall))]
    fallen, since = own[:begun], own[begun:]
    moved = fallen.fresh * (fallen.expected - fallen.x if fall else fallen.x - fallen.expected)
    weight = np.bincount(fallen.segment, weights=fallen.fresh**2, minlength=segments)
    mean = np.bincount(fallen.segment, weights=moved, minlength=segments) / np.maximum(
        weight, SMALLEST_WEIGHT
    )
    half = mean / 2.0
    half[codes] = np.maximum(half[codes], incident.halfway[incident.test])
    beyond = since.x - midpoint(since, half[since.segment], fall=fall)
    total = np.bincount(since.segment, weights=beyond if fall else -beyond, minlength=segments)
    with_others = heard.segment[heard.ordinal >= since.ordinal[0]]
    untold = fall & np.isin(codes, with_others) & ~np.isin(codes, since.segment)
    return (total[codes] < 0.0) | untold


def requests_until_silent(incident: OpenIncident, before: int, history: int) -> int:
    """How many requests from now the next undecided test may be called silent.

    At least 1, also where `history` was made smaller since the last fold, and where all others have left an
    incident and only silent segments stay, in which it is over.
    """
    waiting = incident.last_seen[incident.outcome == WAITING]
    return max(int(waiting.min()) + history - before, 1) if len(waiting) else 1


def closed(
    state: StreamState,
    base: Baselines,
    rows: Columns,
    incident: OpenIncident,
    direction: int,
    left: OpenIncident | None,
) -> DriftClosed:
    """At the request that decided its last recovery test, the last of `rows` (the history as columns).
    `left`: what goes on."""
    changes = (
        _back(state, base, rows, incident, place, direction) for place in range(len(incident.segments))
    )
    return DriftClosed(
        direction=DIRECTIONS[direction],
        ordinal=state.ordinal,
        ended_at=rows.ended_at(-1),
        opened_ordinal=incident.opened_ordinal,
        change_point=incident.change_point,
        reason="recovered" if (incident.outcome == RECOVERED).any() else "no_traffic",
        segments=tuple(change for change in changes if change is not None),
        left=() if left is None else left.names(state),
    )


def _back(
    state: StreamState, base: Baselines, rows: Columns, incident: OpenIncident, place: int, direction: int
) -> SegmentChange | None:
    """The segment's acceptance since it came back past the midpoint; None where it sent nothing since."""
    code = int(incident.segments[place])
    since = rows.ordinal > incident.alarm_ordinal[place]
    own = rows[np.flatnonzero((rows.segment == code) & since & state.ready[rows.stratum])]
    if len(own) == 0:
        return None
    halfway = np.full(len(own), incident.halfway[incident.test[place]])
    begun = likeliest_point(recovery_bets(state, base, own, halfway, fall=direction == 0))
    back = own[begun:]
    after = acceptance_over(state, back)
    return SegmentChange(state.names[code], at_baseline(state, back), after, float(incident.evidence[place]))

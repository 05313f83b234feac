"""Which incidents call for a retraining or for scores of their captured requests, and when. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import takewhile

from driftguard.diagnosis import CONFIDENCES, Confidence, Diagnosis
from driftguard.store.serving_scores import Attempt
from driftguard.store.tables import Incident

MAXIMUM_FAILURES = 3  # failed runs of one incident; after them only a person starts another
RECHECK_PART = 60  # looks for enough traffic during one wait
SHORTEST_RECHECK = timedelta(seconds=2)
LONGEST_RECHECK = timedelta(minutes=1)
RETRY_FAILED_AFTER = timedelta(minutes=5)
LONGEST_RETRY = timedelta(hours=1)  # while the engine does not answer


@dataclass(frozen=True, slots=True)
class PastRun:
    """One earlier run of the incident. `lives`: its process still runs. `has_begun`: the engine answered.
    `was_stopped`: with its process, which was asked to end."""

    state: str
    ended_at: datetime | None
    lives: bool
    has_begun: bool = True
    was_stopped: bool = False


def why_not(diagnosis: Diagnosis | None, least: Confidence, *, may_be_usual: bool = False) -> str | None:
    """Why this diagnosis does not call for a retraining; None if it does.

    Only query drift and a replaced target do, and only with enough confidence, which low never is: where the
    machine is the cause, a new draft would learn nothing and hide the fault. `may_be_usual`: the incident
    repeats one before it, see IncidentEvidence.
    """
    if may_be_usual:
        return "it looks like one of the day or week before, which was over by itself"
    if diagnosis is None:
        return "its cause has not been examined yet"
    told = f"{diagnosis.summary} ({diagnosis.confidence} confidence: {diagnosis.reason})"
    if not diagnosis.retrain:
        return f"{told}; {diagnosis.recommended_action}"
    if diagnosis.confidence == "low":
        return f"{told}; low confidence never starts an automatic retraining"
    if CONFIDENCES.index(diagnosis.confidence) < CONFIDENCES.index(least):
        return f"{told}; an automatic retraining needs {least} confidence (diagnosis.least_confidence)"
    return None


def is_due(runs: Sequence[PastRun], now: datetime, wait: timedelta) -> bool:
    """Whether a run is due for an unresolved fall; `runs` are those of its incident, newest first.

    The first run starts at once. A run that had too little traffic is repeated until there is enough; one
    that failed or was killed, a few times; one that was stopped, as by a restart of the sidecar, however
    often; one whose engine does not answer, for as long as that lasts, each time after twice as long. After a
    rejection by the gate or a rollback by the watch only a person or the nightly job starts another: the same
    traffic would make the same draft.
    """
    if not runs:
        return True
    last = runs[0]
    if last.ended_at is None:
        return last.state not in ("rolling_out", "watching", "rolling_back") and not last.lives
    if last.state == "nothing_to_do":
        return _is_over(last.ended_at, recheck_after(wait), now)
    failures = sum(run.state == "failed" and run.has_begun and not run.was_stopped for run in runs)
    if last.state != "failed" or failures >= MAXIMUM_FAILURES:
        return False
    unanswered = sum(1 for _ in takewhile(lambda run: not run.has_begun, runs))
    doublings = min(max(unanswered - 1, 0), 10)
    return _is_over(last.ended_at, min(RETRY_FAILED_AFTER * (1 << doublings), LONGEST_RETRY), now)


def _is_over(since: datetime, wait: timedelta, now: datetime) -> bool:
    """Also where it has not begun yet: the clock was set back meanwhile."""
    return not since <= now < since + wait


def captures_to_score(incident: Incident) -> int:
    """How many captured requests since the change its diagnosis knew, as the step of SeenEvidence; 0 where
    scores would tell nothing: of a rise or of goodput, and where another target or draft took over."""
    took_over = incident.evidence.predecessor_stream_id is not None or incident.evidence.goes_on is not None
    if incident.direction != "down" or took_over:
        return 0
    return incident.diagnosis.seen.captures if incident.diagnosis is not None else 0


def awaits_scores(incident: Incident, attempt: Attempt | None) -> bool:
    """Captured requests are to be scored, are being scored, or have been and are not weighed yet."""
    if attempt is None or incident.diagnosis is None or is_score_due(incident, attempt):
        return is_score_due(incident, attempt)
    return attempt.state == "scoring" or attempt.captures > incident.diagnosis.seen.scores


def is_score_due(incident: Incident, attempt: Attempt | None) -> bool:
    """There are captured requests, or many more than at the last attempt."""
    return captures_to_score(incident) > (attempt.captures if attempt is not None else 0)


def recheck_after(wait: timedelta) -> timedelta:
    """How long to wait before looking again whether enough traffic is captured."""
    return min(max(wait / RECHECK_PART, SHORTEST_RECHECK), LONGEST_RECHECK)

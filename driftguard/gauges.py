"""Gauges that mirror the database, set by a thread of their own so that a scrape never waits for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

from sqlalchemy.orm import Session

from driftguard import retraining_gauges, stream_gauges
from driftguard.incidents import known_slowdown, positions_of
from driftguard.metrics import RUN_OUTCOMES, VERDICTS, Metrics
from driftguard.standing import Standing
from driftguard.status import StreamStatus
from driftguard.store import incidents, notifications, retrain_runs
from driftguard.store import status_queries as status
from driftguard.store.streams import StreamRow
from driftguard.store.tables import Incident
from driftguard.stream_gauges import Labels, labels_of

MAX_SET_ASIDE_SHOWN: Final = 100
ALWAYS_SHOWN: Final = ("degraded", "cannot_be_judged", "drafting_stopped")  # silence comes for all at once


def refresh(
    session: Session,
    metrics: Metrics,
    every: Sequence[Standing],
    found: Sequence[StreamStatus],
    destinations: Sequence[str],
    now: datetime,
) -> None:
    """`every`: all streams at the moment `now`; `found`: those that have gauges of their own.
    `destinations`: to which notifications are sent."""
    metrics.notifications_undelivered.set(notifications.count_undelivered(session, destinations))
    _count_streams(metrics, every)
    metrics.streams_left_out.labels("gauges").set(len(every) - len(found))
    _show_streams(metrics, found)
    _show_set_aside(metrics, every)
    _show_incidents(session, metrics, {item.stream.id: item.stream for item in every})
    places = {(item.stream.server, item.stream.target) for item in found}
    _show_retraining(session, metrics, places)
    stream_gauges.show(metrics, found)
    retraining_gauges.show(session, metrics)
    metrics.gauges_last_refresh.set(now.timestamp())


def chosen(every: Sequence[Standing], most: int) -> list[Standing]:
    """Those that get gauges of their own: whatever is wrong by itself, and the worst of the others, so that
    they are at most so many. Where both are too many, the silent ones take half of what is left: an outage of
    the network must not take the series of all that goes on."""
    alarming = [item for item in every if item.verdict in ALWAYS_SHOWN]
    silent = [item for item in every if item.verdict == "stale"]
    others = [item for item in every if item.verdict not in (*ALWAYS_SHOWN, "stale")]
    room = max(most - len(alarming), 0)
    shown = silent[: max(room // 2, room - len(others))]
    return [*alarming, *shown, *others[: room - len(shown)]]


def _count_streams(metrics: Metrics, every: Sequence[Standing]) -> None:
    counts = Counter(item.verdict for item in every if item.stream.method != "none")
    metrics.replace(metrics.streams, {(verdict,): counts[verdict] for verdict in VERDICTS})


def _show_streams(metrics: Metrics, found: Sequence[StreamStatus]) -> None:
    metrics.replace(metrics.stream_verdict, {(*labels_of(item.stream), item.verdict): 1.0 for item in found})
    metrics.replace(
        metrics.baseline_ratio,
        {
            (*labels_of(item.stream), part.segment): part.baseline.rate
            for item in found
            for part in item.segments
            if part.baseline and part.baseline.positions == "all"
        },
    )
    metrics.replace(
        metrics.stream_last_arrival,
        {
            labels_of(item.stream): item.stream.traffic_arrived_at.timestamp()
            for item in found
            if item.stream.traffic_arrived_at is not None
        },
    )
    metrics.replace(
        metrics.verdict_since,
        {labels_of(item.stream): item.since.timestamp() for item in found if item.since is not None},
    )


def _show_set_aside(metrics: Metrics, every: Sequence[Standing]) -> None:
    """One that another draft replaced is of no concern any more."""
    since = {labels_of(item.stream): item.set_aside.since.timestamp() for item in every if item.set_aside}
    longest = sorted(since, key=lambda labels: since[labels])[:MAX_SET_ASIDE_SHOWN]
    metrics.streams_set_aside.set(len(since))
    metrics.replace(metrics.stream_set_aside_since, {labels: since[labels] for labels in longest})


def _show_incidents(session: Session, metrics: Metrics, streams: Mapping[int, StreamRow]) -> None:
    metrics.set_open_incidents(incidents.unresolved_counts(session))
    info: dict[Labels, float] = {}
    changed: dict[Labels, float] = {}
    slowdown: dict[Labels, float] = {}
    before: dict[Labels, float] = {}
    after: dict[Labels, float] = {}
    for stream_id, by_direction in status.unresolved_incidents(session).items():
        if stream_id not in streams:
            continue  # it appeared after the streams were read: the next round shows it
        for incident in by_direction.values():
            if incident.awaits_examination:
                continue  # Prometheus pages by these
            labels = (*labels_of(streams[stream_id]), incident.direction, incident.severity)
            info[*labels, *_identity(incident)] = 1.0
            changed[labels] = incident.change_point_at.timestamp()
            if (lost := known_slowdown(incident.evidence)) is not None:
                slowdown[labels] = lost
            for segment in incident.segments:
                of_segment = (*labels, segment["segment"], positions_of([segment]))
                before[of_segment] = segment["before"]["rate"]
                after[of_segment] = segment["after"]["rate"]
    # The alert is made of the last: what its text is made of is there when it appears.
    metrics.replace(metrics.incident_info, info)
    metrics.replace(metrics.incident_change_point, changed)
    metrics.replace(metrics.incident_slowdown, slowdown)
    metrics.replace(metrics.incident_before, before)
    metrics.replace(metrics.incident_after, after)


def _identity(incident: Incident) -> tuple[str, str, str]:
    """Its id, likely cause, and the confidence in that."""
    if incident.diagnosis is None:
        return str(incident.id), "unknown", "low"
    return str(incident.id), str(incident.diagnosis["cause"]), str(incident.diagnosis["confidence"])


def _show_retraining(session: Session, metrics: Metrics, places: set[tuple[str, str]]) -> None:
    """`places`: (server, target) of the streams with gauges of their own."""
    metrics.set_ended_runs(
        [
            *((*place, outcome, 0) for place in places for outcome in RUN_OUTCOMES),
            *status.ended_runs(session),
        ]
    )
    metrics.set_last_successes(retrain_runs.last_success_at(session))
    outcomes, rejected = status.last_outcomes(session), status.rejected_in_a_row(session)
    metrics.replace(
        metrics.retrain_last_outcome,
        {(*place, last): 1.0 for place, last in outcomes.items() if last in RUN_OUTCOMES},
    )
    metrics.replace(
        metrics.retrain_rejected_in_a_row,
        {place: float(rejected.get(place, 0)) for place in outcomes},
    )
    metrics.replace(
        metrics.retrain_last_run,
        {key: at.timestamp() for key, at in status.last_ends(session).items()},
    )

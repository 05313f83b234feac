"""Gauges that mirror the database, set by a thread of their own so that a scrape never waits for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

from prometheus_client import Gauge
from sqlalchemy.orm import Session

from driftguard.cost import LoadSpeedup
from driftguard.cost.payoff import concurrency_words
from driftguard.incidents import cost_measurement
from driftguard.metrics import Metrics
from driftguard.metrics.labels import VERDICTS
from driftguard.status import retraining_gauges, unrecorded
from driftguard.status.stream_status import StreamStatus
from driftguard.status.verdict import Standing
from driftguard.store import incidents, notifications, status_queries
from driftguard.store.streams import StreamRow
from driftguard.store.tables import Incident

Labels = tuple[str, ...]
MAX_SET_ASIDE_SHOWN: Final = 100
# Without "stale": a network outage makes all streams stale at once.
ALWAYS_SHOWN: Final = ("degraded", "cannot_be_judged", "drafting_stopped", "speculation_loses")


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
    metrics.notifications.undelivered.set(notifications.count_undelivered(session, destinations))
    _count_streams(metrics, every)
    metrics.streams.left_out.labels("gauges").set(len(every) - len(found))
    _show_streams(metrics, found)
    _show_set_aside(metrics, every)
    _show_incidents(session, metrics, {item.stream.id: item.stream for item in every})
    places = {(item.stream.server, item.stream.target) for item in found}
    _show_costs(metrics, found)
    _show_unrecorded(session, metrics, now)
    retraining_gauges.refresh(session, metrics, places)
    metrics.loops.gauges_last_refresh.set(now.timestamp())


def chosen(every: Sequence[Standing], most: int) -> list[Standing]:
    """The streams that get gauges of their own: all with a verdict in ALWAYS_SHOWN, and the worst of the
    others up to `most`. If there is no room for all, stale streams take at most half of the remaining places:
    a network outage must not remove the series of the streams that still report."""
    alarming = [item for item in every if item.verdict in ALWAYS_SHOWN]
    silent = [item for item in every if item.verdict == "stale"]
    others = [item for item in every if item.verdict not in (*ALWAYS_SHOWN, "stale")]
    room = max(most - len(alarming), 0)
    shown = silent[: max(room // 2, room - len(others))]
    return [*alarming, *shown, *others[: room - len(shown)]]


def _count_streams(metrics: Metrics, every: Sequence[Standing]) -> None:
    counts = Counter(item.verdict for item in every if item.stream.method != "none")
    metrics.replace(metrics.streams.by_verdict, {(verdict,): counts[verdict] for verdict in VERDICTS})


def _show_streams(metrics: Metrics, found: Sequence[StreamStatus]) -> None:
    metrics.replace(
        metrics.streams.info, {(*labels_of(item.stream), str(item.stream.id)): 1.0 for item in found}
    )
    metrics.replace(metrics.streams.verdict, {(*labels_of(item.stream), item.verdict): 1.0 for item in found})
    metrics.replace(
        metrics.streams.baseline,
        {
            (*labels_of(item.stream), part.segment): part.baseline.rate
            for item in found
            for part in item.segments
            if part.baseline and part.baseline.positions == "all"
        },
    )
    metrics.replace(
        metrics.streams.last_arrival,
        {
            labels_of(item.stream): item.stream.traffic_arrived_at.timestamp()
            for item in found
            if item.stream.traffic_arrived_at is not None
        },
    )
    metrics.replace(
        metrics.streams.verdict_since,
        {labels_of(item.stream): item.since.timestamp() for item in found if item.since is not None},
    )


def _show_costs(metrics: Metrics, found: Sequence[StreamStatus]) -> None:
    costs = [
        (labels_of(item.stream), item.cost)
        for item in found
        if item.in_service
        and item.cost
        and not cost_measurement.is_outdated(item.stream.last_seen_at, item.cost_measured_at)
    ]
    gauges: dict[Gauge, dict[Labels, float | None]] = {
        metrics.streams.tokens_per_second: {
            **{(*labels_of(item.stream), "now"): item.tokens_per_second_now for item in found},
            **{(*labels_of(item.stream), "before"): item.tokens_per_second_baseline for item in found},
        },
        metrics.streams.speedup: {
            (*labels, bound): value
            for labels, cost in costs
            if cost.speedup is not None
            for bound, value in _bounds(cost.speedup)
        },
        metrics.streams.speedup_by_load: {
            (*labels, concurrency_words(load.concurrency), bound): value
            for labels, cost in costs
            for load in cost.loads
            for bound, value in _bounds(load)
        },
        metrics.streams.load: {
            (*labels, concurrency_words(cost.speedup.concurrency)): 1.0
            for labels, cost in costs
            if cost.speedup is not None
        },
        metrics.streams.k: {labels: cost.num_speculative_tokens for labels, cost in costs},
        metrics.streams.best_k: {labels: cost.best for labels, cost in costs},
        metrics.streams.break_even: {
            labels: cost.break_even_acceptance.value if cost.break_even_acceptance else None
            for labels, cost in costs
        },
    }
    for gauge, values in gauges.items():
        metrics.replace(gauge, {labels: value for labels, value in values.items() if value is not None})


def _bounds(load: LoadSpeedup) -> list[tuple[str, float]]:
    """(bound, tokens per second with speculation over those without); empty where that was not measured."""
    if load.factor is None:
        return []
    return [("estimate", load.factor.value), ("low", load.factor.low), ("high", load.factor.high)]


def _show_unrecorded(session: Session, metrics: Metrics, now: datetime) -> None:
    parts: dict[Labels, float] = {
        (one.server, reason): count / one.total
        for one in unrecorded.of_servers(session, now)[: metrics.max_streams]
        for reason, count in one.reasons.items()
    }
    metrics.replace(metrics.streams.unrecorded, parts)


def _show_set_aside(metrics: Metrics, every: Sequence[Standing]) -> None:
    """Streams whose draft was replaced are left out."""
    since = {labels_of(item.stream): item.set_aside.since.timestamp() for item in every if item.set_aside}
    longest = sorted(since, key=lambda labels: since[labels])[:MAX_SET_ASIDE_SHOWN]
    metrics.streams.set_aside.set(len(since))
    metrics.replace(metrics.streams.set_aside_since, {labels: since[labels] for labels in longest})


def _show_incidents(session: Session, metrics: Metrics, streams: Mapping[int, StreamRow]) -> None:
    metrics.incidents.set_open(incidents.unresolved_counts(session))
    info: dict[Labels, float] = {}
    changed: dict[Labels, float] = {}
    slowdown: dict[Labels, float] = {}
    before: dict[Labels, float] = {}
    after: dict[Labels, float] = {}
    for stream_id, by_direction in status_queries.unresolved_incidents(session).items():
        if stream_id not in streams:
            continue  # it appeared after the streams were read: the next round shows it
        for incident in by_direction.values():
            if incident.awaits_examination:
                continue  # Prometheus pages by these
            labels = (*labels_of(streams[stream_id]), incident.direction, incident.severity)
            info[*labels, *_identity(incident)] = 1.0
            changed[labels] = incident.change_point_at.timestamp()
            if (lost := incident.evidence.slowdown) is not None:
                slowdown[labels] = lost
            if incident.evidence.goodput is not None:
                continue  # these are of a change of acceptance
            for segment in incident.segments:
                if segment.back_at is not None:
                    continue  # an alert says that it fell, and ends
                of_segment = (*labels, segment.segment, segment.after.positions)
                before[of_segment], after[of_segment] = segment.levels
    # The alert is based on the last gauge; it is set last, so that the gauges of the alert's text exist
    # already.
    metrics.replace(metrics.incidents.info, info)
    metrics.replace(metrics.incidents.change_point, changed)
    metrics.replace(metrics.incidents.slowdown, slowdown)
    metrics.replace(metrics.incidents.acceptance_before, before)
    metrics.replace(metrics.incidents.acceptance_after, after)


def _identity(incident: Incident) -> tuple[str, str, str]:
    """Its id, likely cause, and the confidence in that."""
    if incident.diagnosis is None:
        return str(incident.id), "unknown", "low"
    return str(incident.id), incident.diagnosis.cause, incident.diagnosis.confidence


def labels_of(stream: StreamRow) -> Labels:
    return stream.server, stream.target, stream.draft_version, stream.method

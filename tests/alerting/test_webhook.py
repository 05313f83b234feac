"""Webhooks against a real receiver, with real workers on a real queue."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import procrastinate
import pytest
from sqlalchemy import select, text

from driftguard.alerting.alertmanager import AlertmanagerSink
from driftguard.alerting.loop import AlertLoop
from driftguard.alerting.webhook import QUEUE, WebhookSink, destinations
from driftguard.metrics import Metrics
from driftguard.store.database import Database
from driftguard.store.jobs import deferring_connector, worker_connector
from driftguard.store.tables import Notification
from tests.alerting.http_receiver import Receiver, http_receiver, wait_until
from tests.alerting.incident_rows import add_incident, add_stream, raise_to, resolve


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with http_receiver() as running:
        yield running


@contextmanager
def delivering(database: Database, urls: list[str]) -> Iterator[Metrics]:
    """A sidecar's alerting: the loop and a worker. Leaving stops it, as a restart would."""
    metrics = Metrics()
    sink = WebhookSink(database, urls, "http://sidecar", metrics)
    with procrastinate.App(connector=deferring_connector(database)).open() as deferring:
        loop = AlertLoop(deferring, sink, AlertmanagerSink(database, [], "http://sidecar", metrics), metrics)
        with _worker(database, sink):
            loop.start()
            try:
                yield metrics
            finally:
                loop.stop()


@contextmanager
def _worker(database: Database, sink: WebhookSink) -> Iterator[None]:
    app = procrastinate.App(connector=worker_connector(database))
    app.add_tasks_from(sink.blueprint, namespace="webhook")
    events = asyncio.new_event_loop()

    async def work() -> None:
        async with app.open_async():
            await app.run_worker_async(
                queues=[QUEUE], install_signal_handlers=False, fetch_job_polling_interval=0.2
            )

    task = events.create_task(work())
    thread = threading.Thread(target=lambda: events.run_until_complete(asyncio.wait([task])))
    thread.start()
    try:
        yield
    finally:
        events.call_soon_threadsafe(task.cancel)
        thread.join()
        events.close()


def rows(database: Database) -> list[Notification]:
    with database.session() as session:
        return list(session.scalars(select(Notification).order_by(Notification.id)))


def test_an_incident_is_posted_once_when_it_opens_and_once_when_it_is_resolved(
    database: Database, receiver: Receiver
) -> None:
    with delivering(database, [receiver.url]) as metrics:
        incident_id = add_incident(database, destinations([receiver.url]))
        wait_until(lambda: len(receiver.taken()) == 1, "the firing notification")
        resolve(database, incident_id)
        wait_until(lambda: all(row.delivered_at for row in rows(database)), "both to be delivered")

    firing, resolved = receiver.received
    assert firing.headers["Idempotency-Key"] == f"{incident_id}:firing:critical"
    assert resolved.headers["Idempotency-Key"] == f"{incident_id}:resolved:critical"
    assert firing.body["event"] == "firing"
    assert firing.body["url"] == f"http://sidecar/incidents/{incident_id}"
    assert firing.body["incident"]["segments"][0]["segment"] == "german"
    assert firing.body["incident"]["cost_percent"] == 23.0
    assert "from 0.74 to 0.58" in firing.body["summary"]
    assert resolved.body["incident"]["resolution"] == "acceptance is back"
    assert (
        metrics.registry.get_sample_value(
            "driftguard_notifications_total",
            {"destination": "webhook", "event": "firing", "outcome": "delivered"},
        )
        == 1
    )


def test_a_receiver_that_is_down_gets_it_once_when_it_is_back_even_over_a_restart(
    database: Database, receiver: Receiver
) -> None:
    receiver.status = 503
    add_incident(database, destinations([receiver.url]))
    with delivering(database, [receiver.url]):
        wait_until(lambda: len(receiver.received) >= 2, "a first attempt and its repetition")
    assert receiver.taken() == []
    (row,) = rows(database)
    assert row.delivered_at is None
    assert "HTTP 503" in (row.last_error or "")

    receiver.status = 200
    with delivering(database, [receiver.url]):
        wait_until(lambda: rows(database)[0].delivered_at is not None, "the delivery")
    with delivering(database, [receiver.url]):  # and another restart, with nothing left to say
        add_incident(database, destinations([receiver.url]), stream_id=add_stream(database, "v2"))
        wait_until(lambda: len(receiver.taken()) >= 2, "the second incident")
    assert len({item.headers["Idempotency-Key"] for item in receiver.taken()}) == 2
    assert len(receiver.taken()) == 2


def test_an_incident_that_becomes_graver_is_posted_again_and_resolved_once(
    database: Database, receiver: Receiver
) -> None:
    hooks = destinations([receiver.url])
    incident_id = add_incident(database, hooks, severity="warning")
    with delivering(database, [receiver.url]):
        wait_until(lambda: len(receiver.taken()) == 1, "the first page")
        raise_to(database, incident_id, "critical", hooks)
        wait_until(lambda: len(receiver.taken()) == 2, "the graver page")
        resolve(database, incident_id)
        wait_until(lambda: all(row.delivered_at for row in rows(database)), "all to be delivered")
    told = [(item.body["event"], item.body["incident"]["severity"]) for item in receiver.taken()]
    assert told == [("firing", "warning"), ("firing", "critical"), ("resolved", "critical")]
    assert len({item.headers["Idempotency-Key"] for item in receiver.taken()}) == 3
    assert "Now critical: it grew." in receiver.taken()[1].body["summary"]


def test_a_receiver_that_was_down_meanwhile_is_paged_once(database: Database, receiver: Receiver) -> None:
    hooks = destinations([receiver.url])
    receiver.status = 503
    incident_id = add_incident(database, hooks, severity="warning")
    with delivering(database, [receiver.url]):
        wait_until(lambda: rows(database)[0].attempts > 0, "an attempt")
        raise_to(database, incident_id, "critical", hooks)
        receiver.status = 200
        wait_until(lambda: all(row.delivered_at for row in rows(database)), "the delivery")
    assert [item.body["incident"]["severity"] for item in receiver.taken()] == ["critical"]


def test_two_sidecars_on_one_database_page_once(database: Database, receiver: Receiver) -> None:
    with delivering(database, [receiver.url]), delivering(database, [receiver.url]):
        incident_id = add_incident(database, destinations([receiver.url]))
        wait_until(lambda: len(receiver.taken()) == 1, "the firing notification")
        resolve(database, incident_id)
        wait_until(lambda: all(row.delivered_at for row in rows(database)), "both to be delivered")
    assert [item.body["event"] for item in receiver.taken()] == ["firing", "resolved"]


def test_a_resolution_waits_until_the_receiver_knows_of_the_incident(
    database: Database, receiver: Receiver
) -> None:
    receiver.status = 500
    incident_id = add_incident(database, destinations([receiver.url]))
    resolve(database, incident_id)
    with delivering(database, [receiver.url]):
        wait_until(lambda: bool(receiver.received), "an attempt")
        receiver.status = 200
        wait_until(lambda: all(row.delivered_at for row in rows(database)), "both to be delivered")
    assert [item.body["event"] for item in receiver.taken()] == ["firing", "resolved"]


def test_a_refusal_is_shown_and_repeated_slowly(database: Database, receiver: Receiver) -> None:
    receiver.status = 404
    add_incident(database, destinations([receiver.url]))
    before = datetime.now(UTC)

    def next_attempt() -> datetime | None:
        query = "SELECT max(scheduled_at) FROM procrastinate_jobs WHERE status = 'todo'"
        with database.session() as session:
            at: datetime | None = session.scalar(text(query))
            return at

    with delivering(database, [receiver.url]):
        wait_until(lambda: next_attempt() is not None, "the repetition to be scheduled")
    (row,) = rows(database)
    assert "HTTP 404" in (row.last_error or "")
    assert len(receiver.received) == 1
    at = next_attempt()
    assert at is not None
    assert (at - before).total_seconds() > 240


def test_a_webhook_that_was_removed_from_the_settings_is_not_called(
    database: Database, receiver: Receiver
) -> None:
    add_incident(database, destinations([receiver.url]))
    with http_receiver() as other, delivering(database, [other.url]):
        add_incident(database, destinations([other.url]), stream_id=add_stream(database, "v2"))
        wait_until(lambda: len(other.taken()) == 1, "the configured webhook")
    assert receiver.received == []


def test_an_unforeseen_failure_is_counted_and_later_pages_go_out(
    database: Database, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter([RuntimeError("nobody foresaw it")])
    defer_new = WebhookSink.defer_new

    def failing_once(sink: WebhookSink, app: procrastinate.App) -> None:
        if sink._database is database:  # not one of another sidecar in this process
            for failure in failures:
                raise failure
        defer_new(sink, app)

    monkeypatch.setattr(WebhookSink, "defer_new", failing_once)
    add_incident(database, destinations([receiver.url]))
    with delivering(database, [receiver.url]) as metrics:
        wait_until(lambda: bool(receiver.taken()), "the page")
    assert metrics.registry.get_sample_value("driftguard_loop_failures_total", {"loop": "alerts"}) == 1

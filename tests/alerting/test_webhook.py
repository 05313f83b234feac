"""Webhooks against a real receiver, from the threads that a sidecar has for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta
from functools import partial

import pytest
from sqlalchemy import func, select, text, update

from driftguard.alerting import webhook
from driftguard.alerting.destination import webhooks
from driftguard.alerting.loop import AlertLoop
from driftguard.alerting.webhook import Webhook
from driftguard.errors import DatabaseUnavailable
from driftguard.metrics import Metrics
from driftguard.outgoing.posting import Answer, post
from driftguard.store import incidents, notifications
from driftguard.store.database import Database
from driftguard.store.tables import Incident, Notification
from tests.alerting.http_receiver import Receiver, http_receiver, wait_until
from tests.alerting.incident_rows import add_incident, add_stream, grow, raise_to, resolve
from tests.api.ingest_server import is_held_up
from tests.outgoing.raw_receiver import dripping, raw_receiver, silent


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with http_receiver() as running:
        yield running


@contextmanager
def delivering(database: Database, urls: Sequence[str]) -> Iterator[Metrics]:
    """A sidecar's alerting. Leaving stops it, as a restart would."""
    metrics = Metrics()
    loop = AlertLoop([Webhook(database, url, "http://sidecar", metrics) for url in urls], metrics)
    loop.start()
    try:
        yield metrics
    finally:
        loop.stop()


def rows(database: Database) -> list[Notification]:
    with database.session() as session:
        return list(session.scalars(select(Notification).order_by(Notification.id)))


def told_of(receiver: Receiver) -> list[str]:
    return [item.body["incident"]["id"] for item in receiver.taken()]


def test_an_incident_is_posted_once_when_it_opens_and_once_when_it_is_resolved(
    database: Database, receiver: Receiver
) -> None:
    with delivering(database, [receiver.url]) as metrics:
        incident_id = add_incident(database, webhooks([receiver.url]))
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
    assert failed_loops(metrics) == 0  # also where there is nothing to post


def failed_loops(metrics: Metrics) -> float | None:
    return metrics.registry.get_sample_value("driftguard_loop_failures_total", {"loop": "alerts"})


def test_a_stop_stores_what_is_being_posted_as_delivered(
    database: Database, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, stopping = threading.Event(), threading.Event()

    def posted_slowly(url: str, body: bytes, headers: dict[str, str]) -> Answer:
        begun.set()
        assert stopping.wait(60)
        time.sleep(0.3)
        return post(url, body, headers)

    monkeypatch.setattr(webhook, "post", posted_slowly)
    add_incident(database, webhooks([receiver.url]))
    with delivering(database, [receiver.url]):
        assert begun.wait(60)
        stopping.set()
    (row,) = rows(database)
    assert row.delivered_at is not None


def test_a_receiver_that_is_down_gets_it_once_when_it_is_back_even_over_a_restart(
    database: Database, receiver: Receiver
) -> None:
    receiver.status = 503
    add_incident(database, webhooks([receiver.url]))
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
        add_incident(database, webhooks([receiver.url]), stream_id=add_stream(database, "v2"))
        wait_until(lambda: len(receiver.taken()) >= 2, "the second incident")
    assert len({item.headers["Idempotency-Key"] for item in receiver.taken()}) == 2
    assert len(receiver.taken()) == 2


def test_an_incident_that_becomes_graver_is_posted_again_and_resolved_once(
    database: Database, receiver: Receiver
) -> None:
    hooks = webhooks([receiver.url])
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
    hooks = webhooks([receiver.url])
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
        incident_id = add_incident(database, webhooks([receiver.url]))
        wait_until(lambda: len(receiver.taken()) == 1, "the firing notification")
        resolve(database, incident_id)
        wait_until(lambda: all(row.delivered_at for row in rows(database)), "both to be delivered")
    assert [item.body["event"] for item in receiver.taken()] == ["firing", "resolved"]


def test_a_resolution_waits_until_the_receiver_knows_of_the_incident(
    database: Database, receiver: Receiver
) -> None:
    receiver.status = 500
    incident_id = add_incident(database, webhooks([receiver.url]))
    resolve(database, incident_id)
    with delivering(database, [receiver.url]):
        wait_until(lambda: bool(receiver.received), "an attempt")
        receiver.status = 200
        wait_until(lambda: all(row.delivered_at for row in rows(database)), "both to be delivered")
    assert [item.body["event"] for item in receiver.taken()] == ["firing", "resolved"]


def test_a_404_of_a_receiver_that_is_being_rolled_out_holds_a_page_back_for_seconds(
    database: Database, receiver: Receiver
) -> None:
    receiver.status = 404
    add_incident(database, webhooks([receiver.url]))
    with delivering(database, [receiver.url]):
        wait_until(lambda: rows(database)[0].last_error is not None, "a first attempt")
        assert rows(database)[0].last_error == "HTTP 404"
        receiver.status = 200
        wait_until(lambda: rows(database)[0].delivered_at is not None, "the delivery")
    first, second = receiver.received
    assert (second.at - first.at).total_seconds() < 60
    assert rows(database)[0].last_error is None


def test_a_message_that_is_refused_is_counted_as_such_and_holds_back_no_other(
    database: Database, receiver: Receiver
) -> None:
    receiver.status = 400
    first = add_incident(database, webhooks([receiver.url]))
    with delivering(database, [receiver.url]) as metrics:
        wait_until(lambda: rows(database)[0].last_error is not None, "a first attempt")
        receiver.status = 200
        second = add_incident(database, webhooks([receiver.url]), stream_id=add_stream(database, "v2"))
        wait_until(lambda: bool(receiver.taken()), "the next page")
    assert [item.body["incident"]["id"] for item in receiver.received] == [str(first), str(second)]
    refused = {"destination": "webhook", "event": "firing", "outcome": "refused"}
    assert metrics.registry.get_sample_value("driftguard_notifications_total", refused) == 1


def test_receivers_that_hang_drip_and_flood_hold_back_no_other(
    database: Database, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "post", partial(post, deadline_seconds=2.0))  # the test waits for its end
    flood = dripping(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 65_536, every_seconds=0.0)
    drip = dripping(b"HTTP/1.1 2")
    with raw_receiver(silent) as hangs, raw_receiver(drip) as drips, raw_receiver(flood) as floods:
        stuck = [hangs.url, hangs.url + "/2", drips.url, drips.url + "/2"]
        urls = [*stuck, floods.url, receiver.url]
        for version in ("v1", "v2", "v3"):
            add_incident(database, webhooks(urls), stream_id=add_stream(database, version))
        with delivering(database, urls):
            wait_until(lambda: min(hangs.requests, drips.requests) >= 2, "the posts that are stuck")
            stuck_since = database_time(database)
            told = webhooks([floods.url, receiver.url])
            wait_until(
                lambda: all(row.delivered_at for row in rows(database) if row.destination in told),
                "the pages of those that answer",
            )
            assert [row.delivered_at for row in rows(database) if row.destination not in told] == [None] * 12
            assert transactions_open_since(database, stuck_since) == 0
    assert len(receiver.taken()) == 3


def database_time(database: Database) -> datetime:
    with database.session() as session:
        now: datetime = session.scalars(text("SELECT clock_timestamp()")).one()
        return now


def transactions_open_since(database: Database, moment: datetime) -> int:
    query = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND xact_start < :moment"
    )
    with database.session() as session:
        return session.scalar(text(query), {"moment": moment}) or 0


def test_an_incident_that_becomes_graver_as_it_is_claimed_is_posted_under_one_key(
    database: Database, receiver: Receiver
) -> None:
    hooks = webhooks([receiver.url])
    incident_id = add_incident(database, hooks, severity="warning")
    with ExitStack() as stack:
        with database.session() as session:
            incident = session.get_one(Incident, incident_id, with_for_update=True)
            stack.enter_context(delivering(database, [receiver.url]))
            wait_until(lambda: is_held_up(database), "the claim, which waits for the incident")
            grow(session, incident, "critical", hooks)
        wait_until(lambda: len(receiver.taken()) == 2, "both")
    told = {(item.headers["Idempotency-Key"], item.body["incident"]["severity"]) for item in receiver.taken()}
    assert told == {(f"{incident_id}:firing:critical", "critical")}


def test_a_sidecar_that_died_while_posting_is_followed_by_another_when_its_lease_is_over(
    database: Database, receiver: Receiver
) -> None:
    incident_id = add_incident(database, webhooks([receiver.url]))
    died = Webhook(database, receiver.url, "http://sidecar", Metrics())
    assert died._claim() is not None
    with delivering(database, [receiver.url]):
        add_incident(database, webhooks([receiver.url]), stream_id=add_stream(database, "v2"))
        wait_until(lambda: len(receiver.taken()) == 1, "the page that nobody had claimed")
        with database.session() as session:
            session.execute(update(Notification).values(leased_until=func.now()))
        wait_until(lambda: len(receiver.taken()) == 2, "the page of the dead")
    assert receiver.taken()[1].headers["Idempotency-Key"] == f"{incident_id}:firing:critical"


def test_what_was_delivered_while_the_database_went_away_is_not_posted_again(
    database: Database, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_incident(database, webhooks([receiver.url]))
    sender = Webhook(database, receiver.url, "http://sidecar", Metrics())
    settle = notifications.settle_delivered

    def away(*_: object) -> None:
        raise DatabaseUnavailable("it went away")

    monkeypatch.setattr(notifications, "settle_delivered", away)
    for _ in range(3):
        with pytest.raises(DatabaseUnavailable):
            sender.deliver()
    monkeypatch.setattr(notifications, "settle_delivered", settle)
    sender.deliver()
    assert rows(database)[0].delivered_at is not None
    assert len(receiver.received) == 1


def test_a_webhook_that_was_removed_from_the_settings_is_not_called(
    database: Database, receiver: Receiver
) -> None:
    add_incident(database, webhooks([receiver.url]))
    with http_receiver() as other, delivering(database, [other.url]):
        incident_id = add_incident(database, webhooks([other.url]), stream_id=add_stream(database, "v2"))
        wait_until(lambda: str(incident_id) in told_of(other), "the configured webhook")
    assert receiver.received == []


def test_a_page_reaches_the_webhook_whose_address_was_mended_meanwhile(
    database: Database, receiver: Receiver
) -> None:
    """Its token is a part of its address: with the old one no page was taken."""
    receiver.status = 401
    old, new = f"{receiver.url}?token=old", f"{receiver.url}?token=new"
    incident_id = add_incident(database, webhooks([old]))
    with delivering(database, [old]):
        wait_until(lambda: len(receiver.received) == 1, "an attempt")
    receiver.status = 200
    with delivering(database, [new]):
        wait_until(lambda: len(receiver.taken()) == 1, "the page")
        resolve(database, incident_id)
        wait_until(lambda: len(receiver.taken()) == 2, "its end")
    assert [item.body["event"] for item in receiver.taken()] == ["firing", "resolved"]


def test_a_webhook_that_is_new_is_told_once_of_each_page_that_is_not_over_and_of_nothing_else(
    database: Database, receiver: Receiver
) -> None:
    over = add_incident(database, webhooks(["http://before"]), stream_id=add_stream(database, "v1"))
    resolve(database, over)
    add_incident(database, [], severity="info", stream_id=add_stream(database, "v2"))
    waits = add_incident(database, [], severity="info", stream_id=add_stream(database, "v3"))
    with database.session() as session:
        session.execute(update(Incident).where(Incident.id == waits).values(awaits_examination=True))
    page = add_incident(database, webhooks(["http://before"]), stream_id=add_stream(database, "v4"))
    for version in ("v5", "v6"):
        with delivering(database, [receiver.url]), delivering(database, [receiver.url]):
            last = add_incident(database, webhooks([receiver.url]), stream_id=add_stream(database, version))
            wait_until(partial(lambda last: str(last) in told_of(receiver), last), "a later page")
    told = told_of(receiver)
    assert (told.count(str(page)), len(told)) == (1, 3)


def test_an_incident_that_somebody_has_locked_delays_no_other_page_of_a_new_webhook(
    database: Database, receiver: Receiver
) -> None:
    """By hand, say, in a session that was forgotten. It is told once that is over."""
    held = add_incident(database, [], stream_id=add_stream(database, "v1"))
    with ExitStack() as running:
        with database.session() as other:
            incidents.lock(other, held)
            running.enter_context(delivering(database, [receiver.url]))
            page = add_incident(database, webhooks([receiver.url]), stream_id=add_stream(database, "v2"))
            wait_until(lambda: told_of(receiver) == [str(page)], "the other page")
        wait_until(lambda: told_of(receiver) == [str(page), str(held)], "the page that was locked")


def test_an_unforeseen_failure_is_counted_and_later_pages_go_out(
    database: Database, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter([RuntimeError("nobody foresaw it")])
    turn = Webhook.deliver

    def failing_once(sender: Webhook) -> float:
        if sender._database is database:  # not one of another sidecar in this process
            for failure in failures:
                raise failure
        return turn(sender)

    monkeypatch.setattr(Webhook, "deliver", failing_once)
    add_incident(database, webhooks([receiver.url]))
    with delivering(database, [receiver.url]) as metrics:
        wait_until(lambda: bool(receiver.taken()), "the page")
    assert failed_loops(metrics) == 1


@pytest.mark.parametrize("waits", ["leased_until", "next_attempt_at"])
def test_nothing_waits_for_days_once_the_clock_of_the_database_was_set_back(
    database: Database, receiver: Receiver, waits: str
) -> None:
    """A lease lasts half a minute, a wait an hour at most: these were set by a clock that was ahead."""
    add_incident(database, webhooks([receiver.url]))
    with database.session() as session:
        session.execute(update(Notification).values({waits: func.now() + timedelta(days=2)}))
    Webhook(database, receiver.url, "http://sidecar", Metrics()).deliver()
    assert len(receiver.taken()) == 1

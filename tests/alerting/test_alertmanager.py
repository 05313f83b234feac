"""The Alertmanager sink: against receivers that stand in for peers, and against the real Alertmanager."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from uuid import UUID

import pytest
from sqlalchemy import select

from driftguard.alerting import alertmanager
from driftguard.alerting.alertmanager import Alertmanager
from driftguard.alerting.destination import alertmanagers
from driftguard.alerting.places import Places
from driftguard.errors import DatabaseUnavailable
from driftguard.metrics import Metrics
from driftguard.outgoing.posting import Answer, NotAnswered
from driftguard.store import incidents, notifications
from driftguard.store.database import Database
from driftguard.store.tables import Notification
from tests.alerting.http_receiver import Receiver, http_receiver, wait_until
from tests.alerting.incident_rows import add_incident, add_stream, raise_to, resolve
from tests.api.ingest_server import read_only
from tests.integration.servers import needs_alertmanager, running_alertmanager


def sink(database: Database, url: str, metrics: Metrics | None = None) -> Alertmanager:
    places = Places("http://sidecar/", "http://grafana/")
    return Alertmanager(database, url, places, metrics or Metrics(), {"cluster": "eu"})


class Clock:
    """In place of the time module: stands still until a test moves it on."""

    def __init__(self) -> None:
        self.seconds = 1_000.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(alertmanager, "time", made)
    return made


def attempts(metrics: Metrics, outcome: str) -> float | None:
    labels = {"destination": "alertmanager", "event": "firing", "outcome": outcome}
    return metrics.registry.get_sample_value("driftguard_notifications_total", labels)


def send(database: Database, urls: Sequence[str], now: datetime) -> None:
    """One round to each of the peers."""
    for url in urls:
        sink(database, url).send(now)


def peer(receiver: Receiver) -> str:
    return receiver.url.removesuffix("/hook")


def notification(database: Database, event: str) -> Notification:
    with database.session() as session:
        return session.scalars(select(Notification).where(Notification.event == event)).one()


def test_every_round_repeats_the_same_alert_with_a_later_end_even_from_a_new_process(
    database: Database,
) -> None:
    opened_at = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
    with http_receiver() as receiver:
        incident_id = add_incident(database, alertmanagers([peer(receiver)]), opened_at=opened_at)
        sink(database, peer(receiver)).send(opened_at + timedelta(seconds=1))
        sink(database, peer(receiver)).send(opened_at + timedelta(seconds=31))
    first, second = (item.body[0] for item in receiver.received)
    assert receiver.received[0].path == "/api/v2/alerts"
    assert first["labels"] == second["labels"]
    assert first["labels"]["alertname"] == "DriftGuardIncident"
    assert (first["labels"]["severity"], first["labels"]["cluster"]) == ("critical", "eu")
    assert first["startsAt"] == second["startsAt"] == "2026-03-01T12:00:00+00:00"
    assert (first["endsAt"], second["endsAt"]) == ("2026-03-01T12:02:01+00:00", "2026-03-01T12:02:31+00:00")
    assert first["generatorURL"] == f"http://sidecar/incidents/{incident_id}"
    assert "german" in first["annotations"]["summary"]
    assert {name: url for name, url in first["annotations"].items() if name.endswith("_url")} == {
        "runbook_url": "http://sidecar/runbooks/DriftGuardIncident",
        "incident_url": f"http://sidecar/incidents/{incident_id}",
        "stream_url": "http://sidecar/streams/1",
        "dashboard_url": "http://grafana/d/driftguard-stream?var-sidecar=http%3A%2F%2Fsidecar&var-server=chat"
        "&var-target=target&var-draft_version=v1&var-method=draft_model&from=1772362500000&to=now",
    }


def test_an_incident_that_becomes_graver_is_another_alert_and_ends_the_one_before(
    database: Database,
) -> None:
    with http_receiver() as receiver:
        peers = alertmanagers([peer(receiver)])
        incident_id = add_incident(database, peers, severity="warning")
        now = datetime.now(UTC)
        sink(database, peer(receiver)).send(now)
        raise_to(database, incident_id, "critical", peers)
        restarted = sink(database, peer(receiver))
        assert restarted.news()
        for minutes in (1, 2, 20):
            restarted.send(now + timedelta(minutes=minutes))
        resolve(database, incident_id)
        restarted.send(now + timedelta(minutes=21))
    first, second, third, late, last = (
        {alert["labels"]["severity"]: (alert["startsAt"], alert["endsAt"]) for alert in item.body}
        for item in receiver.received
    )
    raised_at = second["critical"][0]
    assert raised_at > first["warning"][0]
    assert second["warning"] == third["warning"] == (first["warning"][0], raised_at)
    assert third["critical"] == (raised_at, (now + timedelta(minutes=4)).isoformat())
    assert late == {"critical": (raised_at, (now + timedelta(minutes=22)).isoformat())}
    assert last["critical"][0] == raised_at
    assert last["critical"][1] < (now + timedelta(minutes=1)).isoformat()


def test_an_information_that_becomes_a_page_is_one_alert(database: Database) -> None:
    with http_receiver() as receiver:
        incident_id = add_incident(database, [], severity="info")
        raise_to(database, incident_id, "warning", alertmanagers([peer(receiver)]))
        sink(database, peer(receiver)).send(datetime.now(UTC))
    (only,) = receiver.received[0].body
    assert only["labels"]["severity"] == "warning"


def test_a_resolution_reaches_a_peer_that_was_down_while_the_other_is_not_kept_waiting(
    database: Database,
) -> None:
    with http_receiver() as up, http_receiver() as down:
        peers = [peer(up), peer(down)]
        incident_id = add_incident(database, alertmanagers(peers))
        now = datetime.now(UTC)
        send(database, peers, now)
        down.status = 503
        resolve(database, incident_id)
        send(database, peers, now + timedelta(seconds=30))
        assert [item.body[0]["endsAt"] for item in up.received][-1] < (now + timedelta(minutes=1)).isoformat()

        long_after = now + timedelta(hours=3)
        send(database, peers, long_after)  # the first peer has long heard it
        down.status = 200
        send(database, peers, long_after + timedelta(seconds=30))
        send(database, peers, long_after + timedelta(seconds=60))
    assert len(up.received) == 2
    assert len(down.taken()) == 2  # firing, and the resolution once it was back
    resolved_at = down.taken()[-1].body[0]["endsAt"]
    assert datetime.fromisoformat(resolved_at) < now + timedelta(minutes=1)


def test_a_round_whose_outcome_cannot_be_stored_is_not_posted_again_at_once(database: Database) -> None:
    with http_receiver() as receiver:
        add_incident(database, alertmanagers([peer(receiver)]))
        sender = sink(database, peer(receiver))
        with read_only(database):
            with pytest.raises(DatabaseUnavailable, match="read-only"):
                sender.deliver()
            assert sender.news()
            sender.deliver()
        assert len(receiver.received) == 1


def away(*_: object) -> None:
    """In place of what reads the database."""
    raise DatabaseUnavailable("connection refused")


def test_open_alerts_do_not_end_while_the_database_is_away_for_minutes(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for its upgrade: every open page was told as over, and came anew."""
    monkeypatch.setattr(alertmanager, "RESEND_SECONDS", 0.0)
    with http_receiver() as receiver:
        peers = alertmanagers([peer(receiver)])
        incident_id = add_incident(database, peers)
        resolve(database, add_incident(database, peers, stream_id=add_stream(database, "v2")))
        sender = sink(database, peer(receiver))
        sender.deliver()
        monkeypatch.setattr(incidents, "alerting", away)
        for _ in range(2):
            with pytest.raises(DatabaseUnavailable):
                sender.deliver()
        monkeypatch.setattr(alertmanager, "KEPT_SECONDS", 0.0)
        with pytest.raises(DatabaseUnavailable):
            sender.deliver()
    first, *kept = (item.body for item in receiver.received)
    assert len(first) == 2
    (before,) = (alert for alert in first if alert["labels"]["incident"] == str(incident_id))
    assert [len(alerts) for alerts in kept] == [1, 1]
    ends = [before["endsAt"], *(alert["endsAt"] for (alert,) in kept)]
    assert ends == sorted(set(ends))
    assert all({**alert, "endsAt": ""} == {**before, "endsAt": ""} for (alert,) in kept)


def test_open_alerts_are_kept_in_rounds_and_counted_without_the_database(
    database: Database, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """Those of the severity that an incident has now, and nothing where none is open."""
    metrics = Metrics()
    with http_receiver() as receiver, http_receiver() as other:
        sender, nothing_open = sink(database, peer(receiver), metrics), sink(database, peer(other))
        nothing_open.deliver()
        peers = alertmanagers([peer(receiver)])
        incident_id = add_incident(database, peers, severity="warning")
        raise_to(database, incident_id, "critical", peers)
        sender.deliver()
        monkeypatch.setattr(incidents, "alerting", away)
        monkeypatch.setattr(notifications, "has_unoffered", away)
        for passed, rounds in ((alertmanager.RESEND_SECONDS, 2), (1.0, 2), (alertmanager.RESEND_SECONDS, 3)):
            clock.seconds += passed
            for one in (sender, nothing_open):
                with pytest.raises(DatabaseUnavailable):
                    one.deliver()
            assert len(receiver.received) == rounds
    assert not other.received
    assert [alert["labels"]["severity"] for alert in receiver.received[-1].body] == ["critical"]
    assert attempts(metrics, "delivered") == 3


def test_a_peer_that_fails_is_tried_again_soon_and_then_less_often(database: Database, clock: Clock) -> None:
    """After 1 s, 2 s and 4 s, each shortened by up to a half; once it has answered, in rounds."""
    metrics = Metrics()
    with http_receiver() as receiver:
        peers = alertmanagers([peer(receiver)])
        add_incident(database, peers)
        sender = sink(database, peer(receiver), metrics)

        def posts_after(seconds: float) -> int:
            clock.seconds += seconds
            sender.deliver()
            return len(receiver.received)

        receiver.status = 503
        told = [posts_after(passed) for passed in (0.0, 0.49, 0.51, 0.99, 1.01, 1.99)]
        receiver.status = 200
        told += [posts_after(passed) for passed in (2.01, alertmanager.RESEND_SECONDS - 0.01, 0.01)]
        assert told == [1, 1, 2, 2, 3, 3, 4, 4, 5]
        assert (attempts(metrics, "failed"), attempts(metrics, "delivered")) == (3, 2)

        add_incident(database, peers, stream_id=add_stream(database, "v2"))
        assert posts_after(0.0) == 6  # what is new waits for no round
        receiver.status = 503
        told = [posts_after(passed) for passed in (alertmanager.RESEND_SECONDS, 0.49, 0.51)]
        assert told == [7, 7, 8]


def test_a_peer_that_fails_is_noted_with_its_reason(database: Database) -> None:
    add_incident(database, alertmanagers(["http://127.0.0.1:9"]))
    sender = sink(database, "http://127.0.0.1:9")
    assert sender.news()
    sender.send(datetime.now(UTC))
    row = notification(database, "firing")
    assert row.delivered_at is None
    assert "ConnectError" in (row.last_error or "")
    assert not sender.news()  # from now on it waits for the next round like everything else


def test_a_peer_that_came_while_an_incident_was_open_is_owed_its_end(database: Database) -> None:
    now = datetime.now(UTC)
    with http_receiver() as receiver:
        incident_id = add_incident(database, [])
        send(database, [peer(receiver)], now)
        assert notification(database, "firing").delivered_at is not None
        receiver.status = 503
        resolve(database, incident_id)
        send(database, [peer(receiver)], now + timedelta(seconds=30))
        receiver.status = 200
        send(database, [peer(receiver)], now + timedelta(hours=3))
    assert len(receiver.taken()) == 2
    assert notification(database, "resolved").delivered_at is not None


def test_a_peer_that_refuses_is_counted_apart_from_one_that_is_away(database: Database) -> None:
    metrics = Metrics()
    with http_receiver() as receiver:
        receiver.status = 400
        add_incident(database, alertmanagers([peer(receiver)]))
        sink(database, peer(receiver), metrics).deliver()
    assert (attempts(metrics, "refused"), attempts(metrics, "failed")) == (1, 0)


def test_what_is_over_before_its_first_round_is_no_news_once_that_was_offered(database: Database) -> None:
    """As where fall and recovery are read together after a downtime: its firing is never sent."""
    for status, taken in ((503, False), (200, True)):
        with http_receiver() as receiver:
            receiver.status = status
            peers = alertmanagers([peer(receiver)])
            incident_id = add_incident(database, peers, stream_id=add_stream(database, str(status)))
            now = datetime.now(UTC)
            resolve(database, incident_id)
            with database.session() as session:
                incidents.announce(session, incident_id, peers, "resolved", "critical", now)
            sender = sink(database, peer(receiver))
            assert sender.news()
            sender.send(now)
            assert not sender.news()
            assert bool(receiver.taken()) == taken


def test_an_alert_that_is_kept_without_the_database_ends_in_time_where_the_clock_was_set(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set back by an hour meanwhile: by the clock of the peer the alert would be over as it arrives."""
    monkeypatch.setattr(alertmanager, "RESEND_SECONDS", 0.0)
    with http_receiver() as receiver:
        add_incident(database, alertmanagers([peer(receiver)]))
        sender = sink(database, peer(receiver))
        sender.deliver()
        monkeypatch.setattr(incidents, "alerting", away)
        receiver.ahead_seconds = 3_600.0
        with pytest.raises(DatabaseUnavailable):
            sender.deliver()
    ends_at = datetime.fromisoformat(receiver.received[-1].body[0]["endsAt"])
    assert ends_at > datetime.now(UTC) + timedelta(hours=1)


def test_a_page_that_a_graver_one_replaced_while_its_peer_was_silent_is_not_owed_any_more(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with http_receiver() as receiver:
        peers = alertmanagers([peer(receiver)])
        incident_id = add_incident(database, peers, severity="warning")
        sender = sink(database, peer(receiver))

        def silent(*_: object) -> Answer:
            raise_to(database, incident_id, "critical", peers)
            raise NotAnswered("no answer within 10 s")

        with monkeypatch.context() as patched:
            patched.setattr(alertmanager, "post", silent)
            sender.send(datetime.now(UTC))
        assert sender.news()
        sender.send(datetime.now(UTC))
    assert {alert["labels"]["severity"] for alert in receiver.received[0].body} == {"warning", "critical"}
    with database.session() as session:
        assert notifications.count_undelivered(session, peers) == 0


def test_an_information_is_never_sent(database: Database) -> None:
    with http_receiver() as receiver:
        add_incident(database, [], severity="info")
        sink(database, peer(receiver)).send(datetime.now(UTC))
    assert receiver.received == []


def config(hook: str) -> str:
    return (
        "route: {receiver: hook, group_by: [alertname, incident], group_wait: 0s, group_interval: 1s,"
        " repeat_interval: 1h}\n"
        f"receivers: [{{name: hook, webhook_configs: [{{url: '{hook}', send_resolved: true}}]}}]\n"
    )


def test_what_a_clock_that_was_ahead_has_ended_does_not_fire_on_until_then(database: Database) -> None:
    opened_at = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
    with http_receiver() as receiver:
        incident_id = add_incident(database, alertmanagers([peer(receiver)]), opened_at=opened_at)
        with database.session() as session:
            ended_at = opened_at + timedelta(days=30)
            incidents.move(session, incident_id, "resolved", "acceptance is back", ended_at)
        sink(database, peer(receiver)).send(opened_at + timedelta(minutes=5))
    (alert,) = receiver.received[0].body
    assert (alert["startsAt"], alert["endsAt"]) == ("2026-03-01T12:00:00+00:00", "2026-03-01T12:04:30+00:00")


@pytest.mark.parametrize("ahead", [timedelta(hours=1), -timedelta(hours=1)])
def test_an_alert_ends_in_time_by_the_clock_of_its_peer(database: Database, ahead: timedelta) -> None:
    """Where the sidecar's clock was set back, each alert would be over as it arrives: no page."""
    with http_receiver() as receiver:
        receiver.ahead_seconds = ahead.total_seconds()
        incident_id = add_incident(database, alertmanagers([peer(receiver)]))
        sender = sink(database, peer(receiver))
        for _ in range(2):
            assert sender.send(datetime.now(UTC)) is None
        resolve(database, incident_id)
        assert sender.send(datetime.now(UTC)) is None
    fires, lasts = (
        {name: datetime.fromisoformat(item.body[0][name]) - item.at for name in ("startsAt", "endsAt")}
        for item in receiver.received[-2:]
    )
    assert len(receiver.received) == 4  # the first again, as the answer told the peer's time
    some = timedelta(seconds=20)
    assert abs(fires["endsAt"] - ahead - timedelta(minutes=2)) < some
    assert abs(lasts["endsAt"] - ahead) < some
    assert all(told["startsAt"] <= told["endsAt"] for told in (fires, lasts))


@needs_alertmanager
def test_the_real_alertmanager_pages_once_and_resolves_once_over_a_restart(
    database: Database, tmp_path: Path
) -> None:
    def statuses(incident_id: UUID) -> list[str]:
        return [
            item.body["status"]
            for item in receiver.received
            if item.body["commonLabels"]["incident"] == str(incident_id)
        ]

    with http_receiver() as receiver, running_alertmanager(tmp_path, config(receiver.url)) as url:
        first = add_incident(database, alertmanagers([url]))
        sink(database, url).send(datetime.now(UTC))
        wait_until(lambda: statuses(first) == ["firing"], "the page")
        restarted = sink(database, url)  # knows only what the database knows
        restarted.send(datetime.now(UTC))
        # A second incident passing through whole shows that the first one's repetition was considered.
        second = add_incident(database, alertmanagers([url]), stream_id=add_stream(database, "v2"))
        restarted.send(datetime.now(UTC))
        wait_until(lambda: statuses(second) == ["firing"], "the second page")
        resolve(database, first)
        restarted.send(datetime.now(UTC))
        wait_until(lambda: statuses(first) == ["firing", "resolved"], "the resolution")
        restarted.send(datetime.now(UTC))
        resolve(database, second)
        restarted.send(datetime.now(UTC))
        wait_until(lambda: statuses(second) == ["firing", "resolved"], "the second resolution")
        assert statuses(first) == ["firing", "resolved"]
        labels = receiver.received[0].body["commonLabels"]
        assert labels["alertname"] == "DriftGuardIncident"


@needs_alertmanager
def test_the_real_alertmanager_takes_what_a_clock_that_was_ahead_has_opened(
    database: Database, tmp_path: Path
) -> None:
    """It refuses an alert that ends before it starts, and the others of a round with it."""
    with http_receiver() as receiver, running_alertmanager(tmp_path, config(receiver.url)) as url:
        ahead = add_incident(database, alertmanagers([url]), opened_at=datetime.now(UTC) + timedelta(hours=1))
        assert sink(database, url).send(datetime.now(UTC)) is None
        wait_until(lambda: [each.body["status"] for each in receiver.received] == ["firing"], "the page")
        resolve(database, ahead)
        assert sink(database, url).send(datetime.now(UTC)) is None
        told = ["firing", "resolved"]
        wait_until(lambda: [each.body["status"] for each in receiver.received] == told, "the resolution")


@needs_alertmanager
def test_the_real_alertmanager_pages_where_the_clock_of_the_sidecar_is_behind(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes an alert that is over as it arrives, with 200, and tells nobody."""

    class Behind(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) - timedelta(hours=1)

    monkeypatch.setattr(alertmanager, "datetime", Behind)
    with http_receiver() as receiver, running_alertmanager(tmp_path, config(receiver.url)) as url:
        incident_id = add_incident(database, alertmanagers([url]), opened_at=Behind.now(UTC))
        sender = sink(database, url)
        assert sender.send(Behind.now(UTC)) is None
        wait_until(lambda: [each.body["status"] for each in receiver.received] == ["firing"], "the page")
        with database.session() as session:
            incidents.move(session, incident_id, "resolved", "acceptance is back", Behind.now(UTC))
        assert sender.send(Behind.now(UTC)) is None
        told = ["firing", "resolved"]
        wait_until(lambda: [each.body["status"] for each in receiver.received] == told, "the resolution")


@needs_alertmanager
def test_the_real_alertmanager_resolves_the_alert_that_a_graver_one_replaces(
    database: Database, tmp_path: Path
) -> None:
    def alerts_told() -> set[tuple[str, str]]:
        return {
            (alert["labels"]["severity"], alert["status"])
            for item in receiver.received
            for alert in item.body["alerts"]
        }

    with http_receiver() as receiver, running_alertmanager(tmp_path, config(receiver.url)) as url:
        incident_id = add_incident(database, alertmanagers([url]), severity="warning")
        sink(database, url).send(datetime.now(UTC))
        wait_until(lambda: alerts_told() == {("warning", "firing")}, "the page")
        raise_to(database, incident_id, "critical", alertmanagers([url]))
        sink(database, url).send(datetime.now(UTC))
        raised = {("warning", "firing"), ("warning", "resolved"), ("critical", "firing")}
        wait_until(lambda: alerts_told() == raised, "the graver page, and the end of the one before")
        resolve(database, incident_id)
        sink(database, url).send(datetime.now(UTC))
        wait_until(lambda: alerts_told() == {*raised, ("critical", "resolved")}, "the resolution")

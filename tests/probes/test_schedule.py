"""When probes are replayed by themselves."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from driftguard.probes.schedule import Past, is_due

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


def minutes_ago(minutes: float) -> datetime:
    return NOW - timedelta(minutes=minutes)


def test_at_every_interval_and_at_once_for_a_new_draft() -> None:
    assert is_due(Past(None, None, None), NOW, HOUR)
    assert not is_due(Past(minutes_ago(59), None, None), NOW, HOUR)
    assert is_due(Past(minutes_ago(60), None, None), NOW, HOUR)


def test_a_diagnosis_that_waits_is_answered_at_once_and_only_once() -> None:
    assert is_due(Past(minutes_ago(20), None, minutes_ago(5)), NOW, HOUR)
    assert not is_due(Past(minutes_ago(1), None, minutes_ago(5)), NOW, HOUR)


def test_a_server_that_did_not_answer_is_left_alone_for_a_minute() -> None:
    assert not is_due(Past(None, minutes_ago(0.5), minutes_ago(5)), NOW, HOUR)
    assert is_due(Past(None, minutes_ago(1), None), NOW, HOUR)


def test_one_that_goes_on_failing_is_asked_ever_more_rarely_but_once_an_interval() -> None:
    assert not is_due(Past(None, minutes_ago(3), None, failures=3), NOW, HOUR)
    assert is_due(Past(None, minutes_ago(4), None, failures=3), NOW, HOUR)
    assert not is_due(Past(None, minutes_ago(59), None, failures=999), NOW, HOUR)
    assert is_due(Past(None, minutes_ago(60), None, failures=999), NOW, HOUR)


def test_nobody_is_asked_again_without_traffic_unless_a_diagnosis_waits() -> None:
    replayed, heard = minutes_ago(600), minutes_ago(610)
    assert not is_due(Past(replayed, None, None, heard_at=heard), NOW, HOUR)
    assert is_due(Past(replayed, None, None, heard_at=minutes_ago(10)), NOW, HOUR)
    assert is_due(Past(replayed, None, minutes_ago(5), heard_at=heard), NOW, HOUR)


def test_a_failure_by_a_clock_that_was_ahead_keeps_nobody_from_being_asked() -> None:
    assert is_due(Past(None, NOW + 48 * HOUR, None), NOW, HOUR)

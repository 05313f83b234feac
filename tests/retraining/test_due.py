"""When an incident starts a retraining by itself, and when not."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from driftguard.retraining.due import MAXIMUM_FAILURES, PastRun, is_due

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
WAIT = timedelta(hours=1)


def ended(state: str, minutes_ago: float) -> PastRun:
    return PastRun(state, NOW - timedelta(minutes=minutes_ago), lives=False)


def test_a_new_incident_starts_at_once() -> None:
    assert is_due([], NOW, WAIT)


def test_a_run_that_waits_for_traffic_is_repeated_each_minute() -> None:
    assert not is_due([ended("nothing_to_do", 0.5)], NOW, WAIT)
    assert is_due([ended("nothing_to_do", 1.1)], NOW, WAIT)


def test_what_the_gate_or_the_watch_refused_is_left_to_people() -> None:
    assert not is_due([ended("rejected", 600)], NOW, WAIT)
    assert not is_due([ended("rolled_back", 600)], NOW, WAIT)
    assert not is_due([ended("promoted", 600)], NOW, WAIT)


def test_a_failure_is_repeated_later_and_not_for_ever() -> None:
    assert not is_due([ended("failed", 1)], NOW, WAIT)
    assert is_due([ended("failed", 6)], NOW, WAIT)
    assert not is_due([ended("failed", 6 * n) for n in range(1, MAXIMUM_FAILURES + 1)], NOW, WAIT)


def test_runs_that_were_stopped_use_up_no_attempt() -> None:
    """Three restarts of the sidecar while it trained ended the automatic retraining of an incident."""
    stopped = [replace(ended("failed", 6 * n), was_stopped=True) for n in range(1, 10)]
    assert is_due(stopped, NOW, WAIT)
    failed = [ended("failed", 100)] * MAXIMUM_FAILURES
    assert is_due([*stopped, *failed[1:]], NOW, WAIT)
    assert not is_due([*stopped, *failed], NOW, WAIT)


def test_an_engine_that_does_not_answer_is_asked_again_as_long_as_it_is_away() -> None:
    """Ever more rarely; what it does not take part in is no failure of the training."""
    away = [replace(ended("failed", 5 + 5 * n), has_begun=False) for n in range(3)]
    assert not is_due(away, NOW, WAIT)
    assert is_due(away, NOW + timedelta(minutes=15), WAIT)
    for_days = [replace(ended("failed", 65 * (1 + n)), has_begun=False) for n in range(60)]
    assert is_due(for_days, NOW, WAIT)
    assert not is_due([replace(ended("failed", 55), has_begun=False), *for_days], NOW, WAIT)
    failed = [ended("failed", 20_000)] * (MAXIMUM_FAILURES - 1)
    assert is_due([*for_days, *failed], NOW, WAIT)
    assert not is_due([*for_days, *failed, *failed], NOW, WAIT)


def test_a_running_or_watched_draft_is_left_alone_but_a_killed_run_is_not() -> None:
    assert not is_due([PastRun("training", None, lives=True)], NOW, WAIT)
    assert not is_due([PastRun("watching", None, lives=False)], NOW, WAIT)
    assert is_due([PastRun("training", None, lives=False)], NOW, WAIT)


def test_a_run_that_ended_by_a_clock_which_was_ahead_delays_none() -> None:
    days_ahead = -2 * 24 * 60
    assert is_due([ended("nothing_to_do", days_ahead)], NOW, WAIT)
    assert is_due([ended("failed", days_ahead)], NOW, WAIT)

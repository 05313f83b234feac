"""Counts that wait for the sidecar: bounded, and of the last day."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from driftguard.client import tally
from driftguard.client.protocol import Outcome
from driftguard.client.tally import Tally
from driftguard.records import UnrecordedRequests

NOON = datetime(2026, 3, 10, 12, 34, 56, tzinfo=UTC)


def of(counts: Tally) -> list[UnrecordedRequests]:
    return [count for report in counts.reports() for count in report]


def test_counts_of_a_day_wait_and_older_ones_are_lost() -> None:
    counts = Tally()
    for hours in range(40):
        counts.add("chat", "no_numbers", 1, NOON + timedelta(hours=hours))
    waiting = of(counts)
    assert [count.hour.hour for count in (waiting[0], waiting[-1])] == [3, 3]
    assert waiting[0].hour.minute == waiting[0].hour.second == 0
    assert len(waiting) == 25


def test_beyond_the_most_counts_the_oldest_are_lost() -> None:
    counts = Tally()
    for number in range(tally.MOST_COUNTS + 50):
        counts.add(f"server-{number}", "no_numbers", 1, NOON)
    reports = counts.reports()
    assert max(len(report) for report in reports) == tally.MOST_AT_ONCE
    waiting = of(counts)
    assert (waiting[0].server, len(waiting)) == ("server-50", tally.MOST_COUNTS)


def test_what_is_counted_while_a_report_is_under_way_goes_with_the_next() -> None:
    counts = Tally()
    counts.add("chat", "no_numbers", 2, NOON)
    counts.add("code", "no_numbers", 1, NOON)
    (report,) = counts.reports()
    counts.add("chat", "no_numbers", 3, NOON)
    counts.answered(report, Outcome(2))
    assert [(count.server, count.requests) for count in of(counts)] == [("chat", 5)]
    counts.answered(of(counts), Outcome(1))
    assert of(counts) == []

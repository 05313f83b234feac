"""Stale or only quiet: what can be told from the times of the records alone."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from driftguard.status.staleness import Newest, clock_difference, is_stale
from tests.status.silences import longest_silence

MONDAY = datetime(2026, 3, 2, tzinfo=UTC)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


def minute_of(at: datetime) -> datetime:
    return at.replace(second=0, microsecond=0)


def usual(times: Iterable[datetime]) -> timedelta:
    """The usual silence after the last of them."""
    return longest_silence(sorted({minute_of(at) for at in times}), max(times))


def heard(at: datetime) -> Newest:
    """By clocks that agree, without delay."""
    return Newest(arrived_at=at, ended_at=at)


def every(gap: timedelta, start: datetime, end: datetime) -> list[datetime]:
    return [start + gap * place for place in range(int((end - start) / gap) + 1)]


def office_days(days: int, *, until: datetime | None = None) -> list[datetime]:
    """From eight to seven on working days, twice a minute."""
    opening = [MONDAY + DAY * day + 8 * HOUR for day in range(days) if (MONDAY + DAY * day).weekday() < 5]
    times = [at for start in opening for at in every(MINUTE / 2, start, start + 11 * HOUR)]
    return [at for at in times if until is None or at <= until]


def stale_after(times: list[datetime], longest: timedelta) -> timedelta | None:
    """The shortest silence, in minutes, after which the source is stale; once stale it must stay so."""
    last, known = max(times), usual(times)
    told = [is_stale(heard(last), last + MINUTE * silence, known) for silence in range(int(longest / MINUTE))]
    assert told == sorted(told)
    return MINUTE * told.index(True) if any(told) else None


def test_a_busy_source_is_stale_after_five_minutes() -> None:
    assert stale_after(every(HOUR / 3600, MONDAY, MONDAY + HOUR), DAY) == 6 * MINUTE


@pytest.mark.parametrize("burst", [1, 40])
def test_one_that_sends_in_ten_minutes_what_another_sends_in_one_has_half_an_hour(burst: int) -> None:
    times = [
        at + timedelta(seconds=place)
        for at in every(10 * MINUTE, MONDAY, MONDAY + 5 * HOUR)
        for place in range(burst)
    ]
    assert stale_after(times, DAY) == 31 * MINUTE


def test_an_idle_night_is_not_stale_once_one_was_seen_and_a_failure_by_day_is_found_at_once() -> None:
    assert stale_after(office_days(1), 13 * HOUR) == 6 * MINUTE  # the first night: nobody can know
    assert stale_after(office_days(2), 13 * HOUR) is None
    assert stale_after(office_days(3, until=MONDAY + 2 * DAY + 13 * HOUR), DAY) == 6 * MINUTE


def test_weekends_too() -> None:
    assert stale_after(office_days(14), 61 * HOUR) is None
    assert stale_after(office_days(15, until=MONDAY + 14 * DAY + 11 * HOUR), DAY) == 6 * MINUTE


def test_traffic_that_thins_out_does_not_flap() -> None:
    """A night of random requests, ever rarer and then more again; seed 81."""
    rng = np.random.default_rng(81)
    at, known, requests, stale = MONDAY, [MONDAY], 1, 0
    while at < MONDAY + 12 * HOUR:
        hour = (at - MONDAY) / HOUR
        gap = timedelta(seconds=float(rng.exponential(5.0 * 2.0 ** (6.0 - abs(hour - 6.0)))))
        stale += is_stale(heard(at), at + gap, longest_silence(known, at))
        at += gap
        requests += 1
        if minute_of(at) > known[-1]:
            known.append(minute_of(at))
    assert requests > 500
    assert stale <= 1


def test_a_week_of_silence_is_stale_whatever_was_usual() -> None:
    assert is_stale(heard(MONDAY), MONDAY + 8 * DAY, timedelta(days=30))


@pytest.mark.parametrize("slow", [-MINUTE, 7 * MINUTE, 3 * HOUR])
def test_the_clock_of_the_source_has_no_say(slow: timedelta) -> None:
    ended = [at - slow for at in every(HOUR / 3600, MONDAY, MONDAY + HOUR)]
    newest = Newest(arrived_at=ended[-1] + slow, ended_at=ended[-1])
    told = [is_stale(newest, newest.arrived_at + MINUTE * silence, usual(ended)) for silence in range(20)]
    assert told == [silence > 5 for silence in range(20)]


@pytest.mark.parametrize(
    ("behind", "words"),
    [
        (MINUTE, None),
        (-MINUTE, None),
        (7 * MINUTE, "its clock is 7 min behind that of the sidecar, or its records arrive that late"),
        (-1.5 * MINUTE, "its clock is 2 min ahead of that of the sidecar"),
        (3 * HOUR, "its clock is 3 h behind that of the sidecar, or its records arrive that late"),
        (30 * DAY, "its clock is 30 days behind that of the sidecar, or its records arrive that late"),
    ],
)
def test_clocks_that_disagree_are_told(behind: timedelta, words: str | None) -> None:
    assert clock_difference(Newest(arrived_at=MONDAY + behind, ended_at=MONDAY)) == words

"""When a failed delivery is tried again, by what the receiver said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftguard.alerting.retries import Failure, failure_of, wait_seconds
from driftguard.outgoing.posting import Answer


def waits(status: int, attempts: int, draw: float = 0.0, retry_after: float | None = None) -> list[float]:
    failure = failure_of(Answer(status, retry_after_seconds=retry_after))
    assert failure is not None
    return [wait_seconds(failure, attempt, draw) for attempt in range(1, attempts + 1)]


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_any_2xx_is_a_delivery_whatever_the_body(status: int) -> None:
    assert failure_of(Answer(status, "no", "the answer did not end in time")) is None


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 599])
def test_who_is_away_is_asked_again_after_a_second_and_each_minute_at_last(status: int) -> None:
    assert waits(status, 8) == [1, 2, 4, 8, 16, 32, 60, 60]


@pytest.mark.parametrize("status", [301, 302, 307, 401, 403, 404, 405, 407, 410])
def test_a_receiver_that_is_rolled_out_or_has_its_key_changed_is_asked_again_soon(status: int) -> None:
    assert waits(status, 6) == [5, 10, 20, 40, 80, 120]


@pytest.mark.parametrize("status", [400, 413, 415, 422])
def test_a_message_that_is_refused_is_repeated_slowly(status: int) -> None:
    assert waits(status, 9) == [30, 60, 120, 240, 480, 960, 1920, 3600, 3600]


def test_a_wait_that_the_receiver_asks_for_is_kept_within_reason() -> None:
    assert waits(429, 3, retry_after=30.0) == [30, 30, 30]
    assert waits(503, 1, retry_after=86_400.0) == [120]
    assert waits(429, 3, retry_after=0.0) == [1, 2, 4]


def test_the_waits_of_many_are_spread_over_half_their_length() -> None:
    assert waits(503, 7, draw=0.5) == [0.75, 1.5, 3, 6, 12, 24, 45]


@given(
    status=st.integers(300, 599),
    attempts=st.integers(1, 10**9),
    draw=st.floats(0, 1, exclude_max=True),
    retry_after=st.none() | st.floats(0, 1e300),
)
def test_a_wait_is_never_negative_and_never_longer_than_an_hour(
    status: int, attempts: int, draw: float, retry_after: float | None
) -> None:
    failure = failure_of(Answer(status, "x" * 10_000, None, retry_after))
    assert isinstance(failure, Failure)
    assert 0.5 <= wait_seconds(failure, attempts, draw) <= 3_600
    assert len(failure.reason) < 400

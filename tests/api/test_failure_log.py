"""What the log says of requests that failed."""

from __future__ import annotations

import math

import pytest
from structlog.testing import capture_logs

from driftguard.api import problems
from driftguard.api.problems import FailureLog, MissingExtra
from driftguard.errors import DatabaseUnavailable


def test_hundreds_of_senders_that_try_again_during_an_outage_do_not_fill_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(problems, "OUTAGE_LOG_SECONDS", math.inf)
    failures = FailureLog()
    with capture_logs() as lines:
        for _ in range(300):
            failures.tell(DatabaseUnavailable("connection refused"))
        failures.tell(MissingExtra("pip install it"))
    assert [(line["detail"], line.get("requests")) for line in lines] == [
        ("connection refused", 1),
        ("pip install it", None),
    ]


def test_a_line_tells_how_many_requests_failed_since_the_last_one() -> None:
    times = iter((0.0, 1.0, 2.0, problems.OUTAGE_LOG_SECONDS))
    failures = FailureLog(lambda: next(times))
    with capture_logs() as lines:
        for _ in range(4):
            failures.tell(DatabaseUnavailable("connection refused"))
    assert [line["requests"] for line in lines] == [1, 3]

"""What is put on the bets that begin at each request."""

from __future__ import annotations

import numpy as np
import pytest

from driftguard.detection.statistics.bets import last_per_group
from driftguard.detection.steps.evidence import put_on_bets

REQUESTS = 5_000


@pytest.fixture
def segments() -> np.ndarray:
    """Of three segments, a tenth of the requests of the last."""
    return np.random.default_rng(5).choice(3, REQUESTS, p=[0.6, 0.3, 0.1])


def test_each_segment_begins_a_third_of_what_the_stream_may(segments: np.ndarray) -> None:
    share = put_on_bets(segments, np.arange(1, REQUESTS + 1), np.zeros(3, dtype=np.int64), 3)
    of_each = np.bincount(segments, share)
    assert of_each == pytest.approx(np.full(3, REQUESTS / 3), rel=0.01)
    assert (np.cumsum(share) <= np.arange(1, REQUESTS + 1)).all()


def test_what_is_put_does_not_depend_on_the_batches(segments: np.ndarray) -> None:
    clock, begun, parts = np.arange(1, REQUESTS + 1), np.zeros(3, dtype=np.int64), []
    whole = put_on_bets(segments, clock, begun, 3)
    for part in np.array_split(np.arange(REQUESTS), [0, 1, 7, 2_000]):
        parts.append(put_on_bets(segments[part], clock[part], begun, 3))
        begun = last_per_group(begun, segments[part], clock[part])
    assert np.concatenate(parts).tolist() == whole.tolist()
    assert [segments[at - 1] for at in begun] == [0, 1, 2]


def test_requests_that_no_baseline_watches_leave_what_they_were_given_to_the_next() -> None:
    share = put_on_bets(np.array([0, 1, 0]), np.array([11, 14, 20]), np.array([10, 10]), 2)
    assert share.tolist() == [0.5, 2.0, 4.5]

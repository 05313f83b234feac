"""When the share of unrecorded requests is told, and how."""

from __future__ import annotations

import pytest

from driftguard.records import UNRECORDED_REASONS, WHY, UnrecordedReason
from driftguard.status.unrecorded import Unrecorded


def of(recorded: int, **reasons: int) -> Unrecorded:
    found: dict[UnrecordedReason, int] = {
        reason: reasons[reason] for reason in UNRECORDED_REASONS if reason in reasons
    }
    return Unrecorded("chat", recorded, found, ())


@pytest.mark.parametrize(
    ("recorded", "missing", "told"),
    [
        (95, 5, True),  # 5% of the least requests
        (96, 4, False),
        (9_501, 499, False),
        (0, 99, False),  # too few to say anything
        (50, 49, False),
        (0, 100, True),
    ],
)
def test_it_is_told_from_five_percent_of_a_hundred_requests_on(
    recorded: int, missing: int, told: bool
) -> None:
    assert bool(of(recorded, stop_string=missing).text) is told


def test_one_record_is_not_none() -> None:
    assert of(1, no_numbers=9_999).text.startswith("99% of the 10,000 requests to chat ")
    assert of(0, no_numbers=9_999).text.startswith("All of the 9,999 requests to chat ")


def test_every_reason_has_a_cause_and_a_remedy_in_words() -> None:
    assert set(WHY) == set(UNRECORDED_REASONS)
    for reason in UNRECORDED_REASONS:
        text = of(100, **{reason: 100}).text
        assert f"recorded, because {WHY[reason].cause}. Acceptance is of the others only. " in text
        assert text.endswith(f"{WHY[reason].remedy}.")
        assert ".." not in text

"""What the sentence about an incident says of how acceptance changed, on a page as well."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from driftguard.detection import DriftSeenGradual
from driftguard.incidents.message import document, summary
from driftguard.incidents.opening import tell_gradual
from driftguard.records.documents.acceptance import AdjustedChange, Gradual
from driftguard.store import incidents
from driftguard.store.database import Database
from driftguard.store.tables import Incident, Stream
from tests.alerting.incident_rows import add_incident

AT = datetime(2026, 11, 20, 4, 10, tzinfo=UTC)
GRADUAL = Gradual(
    onset=300,
    onset_at=AT,
    interval=(AT - timedelta(hours=9), AT + timedelta(hours=5)),
    until=AT + timedelta(hours=36),
    moved=-0.031,
    per_day=-0.021,
    certain=True,
    over=False,
)
SHORTER = AdjustedChange(0.735, 0.62, 0.60, 0.63, ("answers are shorter",))


@pytest.fixture
def stored(database: Database) -> tuple[Incident, Stream]:
    """As it comes back from the database."""
    incident_id = add_incident(database, [])
    with database.session() as session:
        incident = session.get_one(Incident, incident_id)
        incident.evidence = replace(incident.evidence, gradual=GRADUAL, adjusted=SHORTER)
    with database.session() as session:
        incident = session.get_one(Incident, incident_id)
        stream = session.get_one(Stream, incident.stream_id)
        session.expunge_all()
    return incident, stream


@pytest.mark.parametrize("state", ["open", "resolved"])
def test_segments_that_are_back_while_others_are_not_are_told(
    stored: tuple[Incident, Stream], state: str
) -> None:
    incident, stream = stored
    fallen = incident.segments[0]
    incident.segments = (
        replace(fallen, segment="code", back_at=AT),
        replace(fallen, segment="german", renamed_from=("deutsch",)),
        replace(fallen, segment="chat", back_at=AT),
        replace(fallen, segment="deutsch", back_at=AT),  # goes on under the other name
    )
    incident.state = state
    assert "in segments code, german, chat and 1 more" in summary(incident, stream)
    assert ("It is over in code, chat by now." in summary(incident, stream)) == (state == "open")


def test_a_gradual_change_says_since_when_how_much_and_how_fast(stored: tuple[Incident, Stream]) -> None:
    incident, stream = stored
    assert incident.evidence.gradual == GRADUAL
    assert (
        "It has been falling since about 2026-11-20 04:10 UTC (between 2026-11-19 19:10 UTC and 2026-11-20 "
        "09:10 UTC), by 0.03 until 2026-11-21 16:10 UTC, about 0.02 a day."
    ) in summary(incident, stream)
    told = document(incident, stream, "firing", "http://driftguard")["incident"]["evidence"]["gradual"]
    assert told["per_day"] == GRADUAL.per_day


def test_a_gradual_change_that_is_over_says_until_when(stored: tuple[Incident, Stream]) -> None:
    incident, stream = stored
    incident.evidence = replace(incident.evidence, gradual=replace(GRADUAL, over=True))
    assert (
        "It fell bit by bit from about 2026-11-20 04:10 UTC (between 2026-11-19 19:10 UTC and 2026-11-20 "
        "09:10 UTC) to about 2026-11-21 16:10 UTC, by 0.03, about 0.02 a day."
    ) in summary(incident, stream)


def test_what_was_told_as_gradual_and_no_longer_is_leaves_the_text_and_is_noted(database: Database) -> None:
    incident_id = add_incident(database, [])
    with database.session() as session:
        incident = session.get_one(Incident, incident_id)
        stream = session.get_one(Stream, incident.stream_id)
        for gradual in (GRADUAL, None):
            tell_gradual(session, stream, DriftSeenGradual("down", 900, AT.timestamp(), gradual), AT)
            session.flush()
    with database.session() as session:
        incident = session.get_one(Incident, incident_id)
        stream = session.get_one(Stream, incident.stream_id)
        assert incident.evidence.gradual is None
        assert "falling" not in summary(incident, stream)
        reasons = [step.reason for step in incidents.transitions(session, incident_id)]
    assert reasons[-2:] == [GRADUAL.text, "by now a change at once is as likely as one that came gradually"]


def test_a_change_that_may_be_gradual_says_only_that(stored: tuple[Incident, Stream]) -> None:
    incident, stream = stored
    incident.evidence = replace(incident.evidence, gradual=replace(GRADUAL, certain=False))
    text = summary(incident, stream)
    assert (
        "It may have begun gradually, 2026-11-19 19:10 UTC at the earliest: that cannot be told yet." in text
    )
    assert "has been falling" not in text


def test_a_sudden_change_says_nothing_of_a_ramp(stored: tuple[Incident, Stream]) -> None:
    incident, stream = stored
    incident.evidence = replace(incident.evidence, gradual=None)
    assert "gradually" not in summary(incident, stream)


def test_counted_rates_that_differ_are_told_with_the_reason(
    stored: tuple[Incident, Stream],
) -> None:
    incident, stream = stored
    assert "Plain counts say 0.60 to 0.63, because answers are shorter" in summary(incident, stream)
    same = replace(SHORTER, counted_before=0.74, counted_after=0.62)
    incident.evidence = replace(incident.evidence, adjusted=same)
    assert "Plain counts" not in summary(incident, stream)

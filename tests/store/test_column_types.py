"""No column takes a number that is not finite, and the refusal names the place."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Double, insert, select, text, update
from sqlalchemy.dialects.postgresql import JSONB

from driftguard.cost import Cost
from driftguard.detection import Acceptance
from driftguard.records.documents.cost import Speed
from driftguard.records.documents.incident import IncidentEvidence
from driftguard.records.documents.retraining_run import RunNumbers
from driftguard.store.column_types import FiniteDocument, FiniteDouble, NotFinite, refuse_not_finite
from driftguard.store.database import Database
from driftguard.store.tables import Base, Incident, Record, RetrainRun, StreamCost
from tests.alerting.incident_rows import add_incident

FINITE = (
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False)
)
NOT_FINITE = st.sampled_from([math.inf, -math.inf, math.nan])
KEYS = st.text("abc_", min_size=1, max_size=3)
NOW = datetime.now(UTC)


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(leaves, lambda part: st.lists(part) | st.dictionaries(KEYS, part), max_leaves=12)


def places(document: Any, where: str) -> Iterator[str]:
    """Of the numbers that are not finite, in their order, by another way than that of the code."""
    if isinstance(document, dict):
        for key in document:
            yield from places(document[key], where + "." + key)
    elif isinstance(document, list):
        for index in range(len(document)):
            yield from places(document[index], f"{where}[{index}]")
    elif document != document or document in (math.inf, -math.inf):
        yield f"{where}: {document} is not a finite number"


@given(nested(FINITE | NOT_FINITE))
def test_a_document_is_refused_for_its_first_number_that_is_not_finite(document: Any) -> None:
    expected = next(places(document, "table.column"), None)
    if expected is None:
        refuse_not_finite(document, "table.column")
        return
    with pytest.raises(NotFinite) as refused:
        refuse_not_finite(document, "table.column")
    assert str(refused.value) == expected


def test_every_column_of_numbers_or_documents_checks_what_is_bound_to_it() -> None:
    named = set()
    for table in Base.metadata.tables.values():
        for column in table.columns:
            assert not isinstance(column.type, (Double, JSONB)), f"{table.name}.{column.name} checks nothing"
            if isinstance(column.type, (FiniteDouble, FiniteDocument)):
                assert column.type.where == f"{table.name}.{column.name}"
                named.add(column.type.where)
    assert {"incidents.evidence", "incidents.acceptance_before", "detector_states.summary"} <= named


def test_a_refusal_names_table_column_and_place_whichever_way_it_is_stored(database: Database) -> None:
    incident_id = add_incident(database, [])
    told = r"^incidents\.evidence\.stream_before\.low: inf is not a finite number$"
    evidence = IncidentEvidence(stream_before=Acceptance(0.5, math.inf, 0.6, 10))
    with pytest.raises(NotFinite, match=told), database.session() as session:
        session.get_one(Incident, incident_id).evidence = evidence
    changed = update(Incident).where(Incident.id == incident_id)
    with pytest.raises(NotFinite, match=told), database.session() as session:
        session.execute(changed.values(evidence=evidence))
    with (
        pytest.raises(NotFinite, match=r"^incidents\.acceptance_after: nan is"),
        database.session() as session,
    ):
        session.execute(changed.values(acceptance_after=math.nan))
    cost = {"stream_id": 1, "measured_at": NOW, "cost": Cost(Speed(-math.inf, 0.1, 3.0, 0.3, 10))}
    where = r"^stream_costs\.cost\.now\.tokens_per_second: -inf is"
    with pytest.raises(NotFinite, match=where), database.session() as session:
        session.execute(insert(StreamCost), [cost])


def test_documents_are_what_they_were(database: Database) -> None:
    """Keys are still looked up, and a null is that of JSON or of SQL where it was."""
    incident_id = add_incident(database, [])
    run = {"server": "chat", "target": "target", "trigger": "manual", "state": "training", "started_at": NOW}
    with database.session() as session:
        evidence = IncidentEvidence(slowdown_formula=0.25, interval=(1, 2))
        session.execute(update(Incident).values(evidence=evidence))
        assert session.scalar(select(Incident.evidence["slowdown_formula"].as_float())) == 0.25
        assert session.scalar(text("SELECT evidence->'interval' FROM incidents")) == [1, 2]
        found = select(Incident.id).where(Incident.evidence.contains({"slowdown_formula": 0.25}))
        assert session.scalar(found) == incident_id
        session.add(RetrainRun(id=uuid4(), **run, progress=None, numbers=RunNumbers(temperature=1.0)))
        session.add(StreamCost(stream_id=1, measured_at=NOW, cost=None))
        session.flush()
        assert session.scalar(text("SELECT progress::text FROM retrain_runs")) == "null"
        assert session.scalar(text("SELECT cost IS NULL FROM stream_costs")) is True
        assert session.scalar(select(RetrainRun.progress)) is None


def test_records_are_copied_past_the_columns_types() -> None:
    """So their numbers are checked where they are decoded: see tests/records/test_acceptance_record.py."""
    assert isinstance(Record.__table__.c.temperature.type, FiniteDouble)

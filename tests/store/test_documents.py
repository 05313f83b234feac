"""Documents of the database: rows of earlier versions are read, and nothing of them is lost by writing again.

tests/store/documents/NNNN.json has the documents that versions with migration NNNN wrote, as far as no
earlier version wrote one of the same shape: taken from the statements of their own tests.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import text

from driftguard.incidents import message
from driftguard.records.documents.incident import names_of, positions_of
from driftguard.store import incidents, retrain_runs
from driftguard.store.column_types import UnreadableDocument
from driftguard.store.database import Database
from driftguard.store.tables import RetrainRun
from tests.alerting.incident_rows import add_incident

NOW = datetime(2026, 1, 1, tzinfo=UTC)
KEPT = [
    pytest.param(row["column"], row["value"], id=f"{file.stem}-{row['column']}-{number}")
    for file in sorted((Path(__file__).parent / "documents").glob("*.json"))
    for number, row in enumerate(json.loads(file.read_text(encoding="utf-8")))
]


def stored(database: Database, column: str, value: Any) -> UUID:
    """A row that has this document, whatever the present types say of it."""
    if column.startswith("retrain_runs"):
        run = RetrainRun(id=uuid4(), server="chat", target="target", trigger="manual", state="watching")
        run.started_at = NOW
        with database.session() as session:
            session.add(run)
        row_id = run.id
    else:
        row_id = add_incident(database, [])
    table, _, name = column.partition(".")
    with database.session() as session:
        session.execute(
            text(f"UPDATE {table} SET {name} = CAST(:value AS jsonb) WHERE id = :id"),
            {"value": json.dumps(value), "id": row_id},
        )
    return row_id


def as_stored(database: Database, column: str) -> Any:
    table, _, name = column.partition(".")
    with database.session() as session:
        return session.scalar(text(f"SELECT {name} FROM {table}"))


def lost(before: Any, after: Any, where: str = "") -> list[str]:
    """What is said before and not, or otherwise, after; a null says nothing."""
    if isinstance(before, dict):
        return [
            place for key in before for place in lost(before[key], (after or {}).get(key), f"{where}.{key}")
        ]
    if isinstance(before, list):
        pairs = zip(before, after, strict=True)
        return [place for number, pair in enumerate(pairs) for place in lost(*pair, f"{where}[{number}]")]
    same = before == after or str(before).replace("+00:00", "Z") == after  # two forms of one time
    return [] if before is None or same else [where]


@pytest.mark.parametrize(("column", "value"), KEPT)
def test_what_an_earlier_version_wrote_is_read_and_kept(database: Database, column: str, value: Any) -> None:
    row_id = stored(database, column, value)
    with database.session() as session:
        if column == "retrain_runs.numbers":
            run = retrain_runs.find(session, row_id)
            assert run is not None
            numbers = retrain_runs.numbers_of(run)
            assert numbers.gate is not None
            assert numbers.gate.promote is value["gate"]["promote"]
            assert (numbers.watch is None) is ("watch" not in value)
            assert (numbers.rollout is None) is ("rollout" not in value)
            session.execute(text("UPDATE retrain_runs SET numbers = NULL"))
            retrain_runs.advance(session, run.id, "watching", numbers=numbers)
        else:
            incident, stream = incidents.find(session, row_id)
            assert message.summary(incident, stream).startswith("Acceptance")
            assert message.document(incident, stream, "firing", "http://sidecar")
            assert names_of(incident.segments)
            assert positions_of(incident.segments) in ("all", "first")
            name = column.partition(".")[2]
            document = getattr(incident, name)
            session.execute(text("UPDATE incidents SET segments = '[]', evidence = '{}', diagnosis = NULL"))
            session.expire(incident)
            setattr(incident, name, document)
    assert lost(value, as_stored(database, column)) == []


def test_a_document_of_another_kind_is_refused_by_column_and_place(database: Database) -> None:
    row_id = stored(database, "incidents.evidence", {"interval": ["one", 2]})
    with (
        pytest.raises(
            UnreadableDocument, match=r"^incidents\.evidence .*`int`, got `str` - at `\$\.interval\[0\]`"
        ),
        database.session() as session,
    ):
        incidents.find(session, row_id)

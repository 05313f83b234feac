"""Bytes of write-ahead log per stored record, with random record ids and with those of version 7.

`python -m tests.benchmarks.bench_wal [--stored N] [--records N]`. PostgreSQL logs a whole page at its first
change after a checkpoint: so `--stored` records are there before, and a checkpoint comes before the count.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

from msgspec import structs
from sqlalchemy import text

from driftguard.records import new_record_id
from driftguard.store import records
from driftguard.store.database import Database, upgrade
from driftguard.store.embedded import start_embedded
from driftguard.store.streams import StreamRegistry
from tests.store.samples import make_records

BATCH = 500
_POSITION = text("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stored", type=int, default=200_000, help="records stored before")
    parser.add_argument("--records", type=int, default=20_000, help="records of the count")
    options = parser.parse_args()
    for name, new_id in (("random (version 4)", uuid.uuid4), ("by time (version 7)", new_record_id)):
        directory = Path(tempfile.mkdtemp(prefix="driftguard-bench-"))
        try:
            with start_embedded(directory) as url:
                upgrade(url)
                database = Database.open(url)
                per_record = _wal_per_record(database, new_id, options.stored, options.records)
                database.close()
        finally:
            shutil.rmtree(directory)
        print(f"{name}: {per_record:,.0f} bytes of WAL per record, after {options.stored:,}", flush=True)


def _wal_per_record(database: Database, new_id: Callable[[], UUID], stored: int, count: int) -> float:
    registry = StreamRegistry()
    _store(database, registry, new_id, stored)
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("CHECKPOINT"))
        before = connection.scalar(_POSITION)
        _store(database, registry, new_id, count)
        after = connection.scalar(_POSITION)
    return float(after - before) / count


def _store(database: Database, registry: StreamRegistry, new_id: Callable[[], UUID], count: int) -> None:
    for start in range(0, count, BATCH):
        made = make_records(BATCH, seed=start, segments=8)
        batch = [structs.replace(record, record_id=new_id()) for record in made]
        with database.session() as session:
            records.insert_batches(session, [batch], registry, datetime.now(UTC))


if __name__ == "__main__":
    main()

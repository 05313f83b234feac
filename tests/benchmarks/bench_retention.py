"""How long ingest waits while a day of rollups goes past retention.

`python -m tests.benchmarks.bench_retention [--rows N]`. One batch of 100 records after the other is stored
while maintenance drops that day, and while nothing else happens.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event

from sqlalchemy import text

from driftguard.settings import RetentionSettings
from driftguard.store.database import UPGRADE, Database, upgrade
from driftguard.store.embedded import start_embedded
from driftguard.store.partitions import ensure_days
from driftguard.store.records import insert_batches
from driftguard.store.retention import maintain
from driftguard.store.streams import StreamRegistry
from tests.store.samples import make_records

BATCH = 100
QUIET_SECONDS = 3.0
_ROLLUPS = """
    INSERT INTO rollups_1m (minute, stream_id, segment, kind, records, steps, drafted, accepted, emitted,
      output_tokens, acceptance_buckets, time_per_output_token_sum, time_per_output_token_count,
      time_to_first_token_sum, time_to_first_token_count)
    SELECT minute, stream_id, 'default', 'request', 80, 100, 400, 300, 400, 400, array_fill(4, ARRAY[20]),
      0.5, 4, 1, 4
    FROM generate_series(:day, :day + interval '1439 minutes', '1 minute') AS minute,
      generate_series(1, :streams) AS stream_id
    """


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=600_000, help="rollups that are past retention")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="driftguard-bench-"))
    try:
        with start_embedded(directory) as url:
            upgrade(url)
            database = Database.open(url)
            _measure(database, options.rows)
            database.close()
    finally:
        shutil.rmtree(directory)


def _measure(database: Database, rows: int) -> None:
    now, retention = datetime.now(UTC), RetentionSettings()
    maintain(database, now, retention)
    day = (now - timedelta(days=retention.minute_rollups_days + 3)).replace(
        hour=0, minute=0, second=0, microsecond=0
    )
    with database.session(UPGRADE) as session:
        ensure_days(session, [day.date()])
        session.execute(text(_ROLLUPS), {"day": day, "streams": rows // 1_440})
        stored = session.scalar(text("SELECT count(*) FROM rollups_1m"))
    done = Event()
    with ThreadPoolExecutor(1) as threads:
        ingest = threads.submit(_store_until, database, done)
        time.sleep(QUIET_SECONDS)
        started = time.perf_counter()
        dropped = maintain(database, now, retention).dropped
        ended = time.perf_counter()
        time.sleep(QUIET_SECONDS)
        done.set()
        commits = ingest.result()
    during = [end - begin for begin, end in commits if end > started and begin < ended]
    quiet = [end - begin for begin, end in commits if end <= started or begin >= ended]
    print(f"{os.cpu_count()} cores; {stored:,} rollups in {', '.join(dropped)}: {ended - started:.2f} s")
    print(
        f"longest transaction of ingest meanwhile {max(during):.3f} s; otherwise "
        f"median {statistics.median(quiet):.3f} s, longest {max(quiet):.3f} s"
    )


def _store_until(database: Database, done: Event) -> list[tuple[float, float]]:
    registry, commits, number = StreamRegistry(), [], 0
    while not done.is_set():
        number += 1
        batch = make_records(BATCH, seed=number)
        begin = time.perf_counter()
        with database.session() as session:
            insert_batches(session, [batch], registry, datetime.now(UTC))
        commits.append((begin, time.perf_counter()))
    return commits


if __name__ == "__main__":
    main()

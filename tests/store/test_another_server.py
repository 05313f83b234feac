"""A standby takes over that lacks the last transactions, as with asynchronous replication: what is remembered
of the server before is not true of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from uuid import uuid4

from sqlalchemy import func, select, text

from driftguard.detection import DetectorConfig
from driftguard.ingest.queue import IngestQueue
from driftguard.metrics import Metrics
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.store import folding
from driftguard.store.database import Database, parse_url, upgrade
from driftguard.store.embedded import start_embedded
from driftguard.store.tables import Record, Stream
from tests.conftest import create_database, server_directory
from tests.pipeline.traffic import Traffic, store
from tests.store.samples import make_records


class Cluster:
    """`database` leads to the primary, and after `fail_over` to a standby that has none of its rows."""

    def __init__(self, standby_url: str, stack: ExitStack) -> None:
        standby = parse_url(standby_url)
        self._primary = stack.enter_context(ExitStack())
        directory = self._primary.enter_context(server_directory())
        primary_url = self._primary.enter_context(start_embedded(directory))
        upgrade(create_database(primary_url, str(standby.database)))
        hosts = f"{parse_url(primary_url).query['host']},{standby.query['host']}"
        self.database = Database.open(standby.update_query_dict({"host": hosts}).render_as_string(False))
        stack.callback(self.database.close)

    def fail_over(self) -> None:
        self._primary.close()


@contextmanager
def cluster(standby_url: str) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(standby_url, stack)


def test_records_are_stored_with_their_stream_where_that_was_lost(database_url: str) -> None:
    with cluster(database_url) as two, ExitStack() as stack:
        ingest = IngestQueue(two.database, max_queued_records=100, metrics=Metrics())
        ingest.start()
        stack.callback(ingest.stop)
        ingest.submit(make_records(5)).result(60)
        two.fail_over()
        assert ingest.submit(make_records(5, seed=1)).result(60).accepted == 5
        with two.database.session() as session:
            of_streams = select(func.count()).select_from(Record).join(Stream, Stream.id == Record.stream_id)
            assert session.scalar(of_streams) == 5
        assert Pipeline(two.database, DetectorConfig(), Metrics()).fold_batch() == 5


def test_states_of_streams_are_those_of_the_server_that_is_there(database_url: str) -> None:
    """Also where another sidecar has folded there so often that the number of the fold tells nothing."""
    with cluster(database_url) as two:
        pipeline = Pipeline(two.database, DetectorConfig(), Metrics(), take_over_seconds=0.0)
        traffic = Traffic(seed=3)
        store(two.database, traffic.draw(200, {"chat": 0.75}))
        pipeline.fold_batch()
        two.fail_over()
        other = Pipeline(two.database, DetectorConfig(), Metrics(), process_id=uuid4())
        store(two.database, traffic.draw(50, {"chat": 0.75}))
        other.fold_batch()
        with two.database.session() as session:  # an incident of another stream was written since
            folding.set_progress(session, folding.progress(session)._replace(folds=7, folded_by=None))
            session.execute(text("UPDATE detector_states SET fold = 1"))
        store(two.database, traffic.draw(10, {"chat": 0.75}))
        pipeline.fold_batch()
        with two.database.session() as session:
            summary = folding.summaries(session, [1])
        assert summary[1]["requests"] == 60

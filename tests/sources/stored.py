"""What is stored of the windows of a source, and a database that fails."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from driftguard.errors import Busy, DatabaseUnavailable
from driftguard.records import AcceptanceRecord
from driftguard.store.records import BatchResult


@dataclass
class Stored:
    """The place of the ingest queue; while `is_away` it fails as the queue does. `is_unanswered`: what it
    stores meanwhile is stored, and the answer to its commit is lost. `is_full`: it takes nothing, as what
    others have sent waits for the database."""

    records: list[AcceptanceRecord] = field(default_factory=list)
    is_away: bool = False
    is_unanswered: bool = False
    is_full: bool = False

    def submit(self, records: Sequence[AcceptanceRecord]) -> Future[BatchResult]:
        if self.is_full:
            raise Busy("records wait for the database", retry_after_seconds=1)
        future: Future[BatchResult] = Future()
        if not self.is_away:
            known = {record.record_id for record in self.records}
            self.records += [record for record in records if record.record_id not in known]
        if self.is_away or self.is_unanswered:
            future.set_exception(DatabaseUnavailable("the database cannot be reached"))
        else:
            future.set_result(BatchResult(len(records), 0))
        return future

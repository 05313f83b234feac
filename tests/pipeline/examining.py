"""The examination of a fold's incidents, without the sidecar's threads."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from driftguard.incidents.examination import Examiner
from driftguard.incidents.opening import Paging
from driftguard.metrics import Metrics
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.store.database import Database

PAGER: Final = Paging(("webhook:http://pager",))


def examine(database: Database, paging: Paging = PAGER) -> None:
    """Once, as a sidecar does that has just started."""
    examiner = Examiner(database, Metrics(), minimum_drop=0.1, paging=paging)
    examiner.examine(datetime.now(UTC))


def fold_and_examine(pipeline: Pipeline, database: Database) -> None:
    """Folds and examines everything that is stored."""
    while pipeline.fold_batch():
        pass
    examine(database)

"""Folds a database until nothing is left, and examines its incidents, in processes that can be killed.

    python -m tests.pipeline.folding_process URL

Each line of input is the size of a batch. A process forked for it folds, because importing what that needs
takes longer than folding. Its process id is printed, and once it has ended its exit code (negative: the
signal).
"""

from __future__ import annotations

import multiprocessing
import sys
from contextlib import redirect_stdout

from driftguard.detection import DetectorConfig
from driftguard.metrics import Metrics
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.store.database import Database
from tests.pipeline.examining import examine


def fold_all(url: str, batch_records: int) -> None:
    database = Database.open(url)
    pipeline = Pipeline(database, DetectorConfig(minimum_drop=0.1), Metrics(), batch_records=batch_records)
    with redirect_stdout(sys.stderr):  # the log
        while pipeline.fold_batch():
            examine(database)


if __name__ == "__main__":
    forking = multiprocessing.get_context("fork")
    for line in sys.stdin:
        process = forking.Process(target=fold_all, args=(sys.argv[1], int(line)))
        process.start()
        print(process.pid, flush=True)
        process.join()
        print(process.exitcode, flush=True)

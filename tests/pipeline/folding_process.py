"""Folds a database until nothing is left: python -m tests.pipeline.folding_process URL BATCH."""

from __future__ import annotations

import sys

from driftguard.detection import DetectorConfig
from driftguard.metrics import Metrics
from driftguard.pipeline import Pipeline
from driftguard.store.database import Database

if __name__ == "__main__":
    pipeline = Pipeline(
        Database.open(sys.argv[1]),
        DetectorConfig(minimum_drop=0.1),
        Metrics(),
        destinations=["webhook:http://pager"],
        batch_records=int(sys.argv[2]),
    )
    print("folding", flush=True)
    while pipeline.fold_batch():
        pass

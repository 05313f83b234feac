"""python -m tests.retraining.retrain_process DATABASE_URL DATA_DIR ENGINE_URL STEPS: a run to be killed."""

from __future__ import annotations

import sys
from pathlib import Path

from driftguard.retraining.run import retrain
from driftguard.store.database import Database
from tests.retraining.world import make_settings


def main() -> int:
    url, data_dir, engine_url, steps = sys.argv[1:]
    settings = make_settings(Path(data_dir), engine_url, steps=int(steps))
    return retrain(Database.open(url), settings).exit_code


if __name__ == "__main__":
    sys.exit(main())

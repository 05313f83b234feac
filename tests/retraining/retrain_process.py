"""python -m tests.retraining.retrain_process DATABASE_URL DATA_DIR ENGINE_URL STEPS: a run to be killed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from driftguard.retraining.run import retrain
from driftguard.retraining.training import process
from driftguard.store.database import Database
from tests.retraining.training_here import run_here
from tests.retraining.world import make_settings


def main(arguments: Sequence[str]) -> int:
    url, data_dir, engine_url, steps = arguments
    settings = make_settings(Path(data_dir), engine_url, steps=int(steps))
    return retrain(Database.open(url), settings).exit_code


def main_training_here(arguments: Sequence[str]) -> int:
    """For a forked process."""
    process._run = run_here
    return main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

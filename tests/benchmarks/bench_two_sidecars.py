"""What a second sidecar on the same database costs: `python -m tests.benchmarks.bench_two_sidecars`.

Each round stores some records of every stream; then whoever may folds them: one sidecar alone, two of which
the one that folded last goes on, two that fold in turn. Microseconds of processor time per record of both
sidecars together, PostgreSQL apart, and their ratio to one alone; the three scenes take rounds in turn.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from driftguard.detection import DetectorConfig
from driftguard.metrics import Metrics
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.store.database import Database, upgrade
from driftguard.store.embedded import start_embedded
from tests.pipeline.traffic import Traffic, store

STREAMS = 100
RECORDS = 10  # of each stream and round
ROUNDS = 40
WARM_UP = 10  # rounds that are not counted
NEVER = float("inf")  # rounds of several scenes take longer than traffic that goes on
ALONE = "one sidecar"
SCENES = {
    ALONE: (1, NEVER),
    "two, the one that folded last goes on": (2, NEVER),
    "two, in turn": (2, 0.0),
}


@dataclass(slots=True)
class Scene:
    database: Database
    pipelines: list[Pipeline]
    traffic: Traffic
    spent_seconds: float = 0.0


def main() -> None:
    with ExitStack() as stack:
        scenes = {name: stack.enter_context(_opened(*each)) for name, each in SCENES.items()}
        for number in range(WARM_UP + ROUNDS):
            for scene in scenes.values():
                _round(scene, number)
    for name, scene in scenes.items():
        each = 1e6 * scene.spent_seconds / (ROUNDS * STREAMS * RECORDS)
        ratio = scene.spent_seconds / scenes[ALONE].spent_seconds
        print(f"{name}: {each:.1f} us per record, {ratio:.2f} times one alone", flush=True)


@contextmanager
def _opened(sidecars: int, take_over_seconds: float) -> Iterator[Scene]:
    with tempfile.TemporaryDirectory() as directory, start_embedded(Path(directory) / "data") as url:
        upgrade(url)
        database, config = Database.open(url), DetectorConfig(minimum_drop=0.1)
        pipelines = [
            Pipeline(database, config, Metrics(), process_id=uuid4(), take_over_seconds=take_over_seconds)
            for _ in range(sidecars)
        ]
        yield Scene(database, pipelines, Traffic(seed=7))
        database.close()


def _round(scene: Scene, number: int) -> None:
    """Both look, the one that did not fold in the round before first."""
    servers = [f"server {stream}" for stream in range(STREAMS)]
    draw = scene.traffic.draw
    store(scene.database, [one for name in servers for one in draw(RECORDS, {"chat": 0.75}, server=name)])
    begun = time.process_time()
    for place in range(len(scene.pipelines)):
        scene.pipelines[(number + place) % len(scene.pipelines)].fold_batch()
    if number >= WARM_UP:
        scene.spent_seconds += time.process_time() - begun


if __name__ == "__main__":
    main()

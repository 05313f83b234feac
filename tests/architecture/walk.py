"""Which files of driftguard/ a call passes through: `python -m tests.architecture.walk` prints two walks.

- The batch in which an incident opens, and the examination after its commit, until somebody is told.
- One quiet record of a stream whose baseline is ready.

Printed are the files, and behind each the files that it calls. An edge is (file of the caller, file of the
callee), both in driftguard/ and not the same; where a library stands between the two there is none. A
comprehension, a lambda and a generator expression belong to the file that they are written in; who takes the
next item of a generator calls it. Both walks are taken after the same work was done once on another database,
so what happens once in a process (imports, caches) is not counted.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Final
from unittest.mock import patch

from structlog.testing import capture_logs

import driftguard
from driftguard.detection import DetectorConfig
from driftguard.incidents.examination import Examiner
from driftguard.metrics import Metrics
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.retraining.promotion.watch_hook import watch_promoted
from driftguard.store.database import Database
from driftguard.store.embedded import start_embedded
from tests.conftest import create_template, fresh_database, server_directory, stop_syncing
from tests.pipeline.examining import PAGER
from tests.pipeline.traffic import Traffic, store

SIDECAR: Final = Path(str(driftguard.__file__)).parent
GOOD: Final = {"code": 0.75, "english": 0.7, "german": 0.7}
BAD: Final = {**GOOD, "german": 0.35}


@dataclass(slots=True)
class Walk:
    """Files by their path in driftguard/."""

    files: set[str] = field(default_factory=set)
    edges: set[tuple[str, str]] = field(default_factory=set)

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """For sys.setprofile."""
        if event != "call" or (callee := _file(frame)) is None:
            return
        self.files.add(callee)
        caller = _file(frame.f_back) if frame.f_back else None
        if caller is not None and caller != callee:
            self.edges.add((caller, callee))


def _file(frame: FrameType) -> str | None:
    """None outside of driftguard/."""
    path = Path(frame.f_code.co_filename)
    return path.relative_to(SIDECAR).as_posix() if path.is_relative_to(SIDECAR) else None


@contextmanager
def walked() -> Iterator[Walk]:
    """What is called in the block, on threads that it begins too, but on no others: the sidecar of another
    test may still be served in this process."""
    walk, begin, ours = Walk(), threading.Thread.start, {threading.current_thread()}

    def begin_noted(thread: threading.Thread) -> None:
        if threading.current_thread() in ours:
            ours.add(thread)
        begin(thread)

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if threading.current_thread() in ours:
            walk.profile(frame, event, argument)

    before, collecting = sys.getprofile(), gc.isenabled()
    gc.disable()  # what it ends in the middle is no part of the walk
    threading.setprofile(profile)
    try:
        with patch.object(threading.Thread, "start", begin_noted):
            sys.setprofile(walk.profile)
            yield walk
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
        if collecting:
            gc.enable()


def incident_opens(database: Database) -> Walk:
    """The batch in which a fall is found in one segment, then the examination of its incident.

    No dependence is measured in it, which an incident does not need: that is two files and eight edges.
    """
    traffic, pipeline = yesterdays_traffic(), sidecars_pipeline(database)
    store(database, traffic.draw(1500, GOOD))
    fold_all(pipeline)
    store(database, traffic.draw(100, BAD))
    examiner = Examiner(database, Metrics(), minimum_drop=0.1, paging=PAGER)
    with walked() as walk:
        pipeline.fold_batch()
        examiner.examine(datetime.now(UTC))
    return walk


def quiet_record(database: Database) -> Walk:
    """One record in which nothing is found, of a stream whose state is in memory."""
    traffic, pipeline = yesterdays_traffic(), sidecars_pipeline(database)
    store(database, traffic.draw(1500, GOOD))
    fold_all(pipeline)
    store(database, traffic.draw(1, GOOD))
    with walked() as walk:
        pipeline.fold_batch()
    return walk


def yesterdays_traffic() -> Traffic:
    """Half an hour at noon: no day ends in it, whenever the walk is taken."""
    noon = datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=0)
    return Traffic(seed=1, start=noon - timedelta(days=1))


def sidecars_pipeline(database: Database) -> Pipeline:
    """With what the sidecar calls after each fold (driftguard.app), without its threads."""
    return Pipeline(database, DetectorConfig(minimum_drop=0.1), Metrics(), after_fold=[watch_promoted])


def fold_all(pipeline: Pipeline) -> None:
    while pipeline.fold_batch():
        pass


def warmed(walk: Callable[[Database], Walk], server_url: str, template: str) -> Walk:
    """The second of two: what happens once in a process was done by the first. The log is not walked through:
    what it does depends on who configured it."""
    for _ in range(2):
        for url in fresh_database(server_url, template):
            database = Database.open(url)
            try:
                with capture_logs():
                    found = walk(database)
            finally:
                database.close()
    return found


def shown(name: str, walk: Walk) -> str:
    lines = [f"{name}: {len(walk.files)} files, {len(walk.edges)} edges"]
    for file in sorted(walk.files):
        callees = sorted(callee for caller, callee in walk.edges if caller == file)
        lines.append(f"  {file}" + (f" -> {', '.join(callees)}" if callees else ""))
    return "\n".join(lines)


def main() -> None:
    with server_directory() as directory, start_embedded(directory) as server_url:
        stop_syncing(server_url)
        template = create_template(server_url)
        for name, walk in (("an incident opens", incident_opens), ("a quiet record", quiet_record)):
            print(shown(name, warmed(walk, server_url, template)), end="\n\n")


if __name__ == "__main__":
    main()

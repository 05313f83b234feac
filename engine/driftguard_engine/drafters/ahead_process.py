"""The process of `ahead_worker` as the engine sees it: started, asked, and ended with the drafter."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Protocol

from driftguard_engine.drafters.ahead_worker import READY, Job, Outcome, Settings

PATIENCE_SECONDS = 10.0  # for an answer; a process that gives none is stopped
_MAIN = "from driftguard_engine.drafters.ahead_worker import main; main()"


class WorkerLost(Exception):
    """The process has ended, or does not answer."""


class Worker(Protocol):
    """What a drafter needs of the process."""

    def ready(self, seconds: float) -> bool:
        """Whether it takes jobs, by then. Raises WorkerLost."""
        ...

    def ask(self, job: Job) -> None:
        """Raises WorkerLost."""
        ...

    def chosen(self, number: int) -> list[Outcome]:
        """The outcomes of this job. Raises WorkerLost."""
        ...

    def prepared(self, number: int) -> float:
        """Waits until they are prepared; the seconds that this job took. Raises WorkerLost."""
        ...

    def end(self) -> None: ...


class AheadProcess:
    """See `Worker`. It ends with this object, and with the engine's process, however that ends."""

    def __init__(self, model_file: int, memory: int, settings: Settings) -> None:
        """model_file, memory: file descriptors, see `ahead_worker.main`. Waits for nothing."""
        self._connection, theirs = Pipe()
        handles = theirs.fileno(), model_file, memory
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _MAIN, *map(str, handles)],
            pass_fds=handles,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        theirs.close()
        self._end = weakref.finalize(self, _end, self._connection, self._process)
        self._connection.send(settings)
        self._is_ready = False

    def end(self) -> None:
        self._end()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self, seconds: float) -> bool:
        try:
            if not self._is_ready and self._connection.poll(seconds):
                self._is_ready = self._connection.recv() == READY
        except (EOFError, OSError) as error:
            raise self._lost() from error
        return self._is_ready

    def ask(self, job: Job) -> None:
        try:
            self._connection.send(job)
        except OSError as error:
            raise self._lost() from error

    def chosen(self, number: int) -> list[Outcome]:
        found: list[Outcome] = self._answer(number)
        return found

    def prepared(self, number: int) -> float:
        seconds: float = self._answer(number)
        return seconds

    def _answer(self, number: int) -> Any:
        try:
            while self._connection.poll(PATIENCE_SECONDS):
                of_job, answer = self._connection.recv()
                if of_job == number:  # else of a job that was abandoned
                    return answer
        except (EOFError, OSError) as error:
            raise self._lost() from error
        raise WorkerLost(f"it gave no answer within {PATIENCE_SECONDS:g} seconds")

    def _lost(self) -> WorkerLost:
        try:
            return WorkerLost(f"it ended with exit status {self._process.wait(1.0)}")
        except subprocess.TimeoutExpired:
            return WorkerLost("it closed its connection")


def _end(connection: Connection, process: subprocess.Popen[bytes]) -> None:
    connection.close()
    process.kill()
    process.wait()

"""Real processes that start at once: forked from one that has already imported torch and the engine.

Starting Python and importing torch takes seconds, which is most of the time of a test of a process. What such
a test checks (signals, kill -9, files and sockets left behind) is the same in a forked process. That the
commands start from a shell is tested with the commands.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TextIO

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "driftguard.retraining.run",
        "driftguard_engine.server.app",
        "driftguard_training.distill",
        "driftguard_training.evaluate",
        "transformers.models.llama.modeling_llama",  # transformers would import it with the first model
    ]
)

Main = Callable[[Sequence[str]], object]  # module-level; returns the exit code, or ends with SystemExit


class ForkedProcess:
    """The part of subprocess.Popen that the tests use. Standard error goes to `log`."""

    def __init__(
        self, main: Main, arguments: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> None:
        reading, writing = _context.Pipe(duplex=False)
        self._process = _context.Process(
            target=_run, args=(main, list(arguments), writing, log, dict(environment))
        )
        self._process.start()
        writing.close()
        self.stdout: TextIO = os.fdopen(os.dup(reading.fileno()), encoding="utf-8")
        reading.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"still running after {timeout} s"
        return self._process.exitcode


@contextmanager
def forked(
    main: Main, arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[ForkedProcess]:
    """The process, killed at the end if it still runs."""
    process = ForkedProcess(main, arguments, log, os.environ if environment is None else environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _run(
    main: Main, arguments: Sequence[str], output: Connection, log: Path, environment: Mapping[str, str]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(output.fileno(), 1)
    output.close()
    with log.open("ab") as errors:
        os.dup2(errors.fileno(), 2)
    sys.exit(main(arguments))  # type: ignore[arg-type]

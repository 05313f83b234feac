"""Several worker processes: started together, restarted where one dies, stopped together."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Final, NoReturn

import structlog

from driftguard.errors import DriftGuardError
from driftguard.proxy.counts import IN_FLIGHT, QUEUED, SharedCounts
from driftguard.proxy.listening import Listeners

_log = structlog.get_logger(__name__)

RESTART_SECONDS: Final = 1.0  # between the end of a worker and the start of its replacement
_STOP: Final = frozenset({signal.SIGTERM, signal.SIGINT})
_CLEAN: Final = (0, -signal.SIGTERM)  # the latter: stopped before it could handle the signal
_AWAITED: Final = _STOP | {signal.SIGCHLD}


class WorkerFailed(DriftGuardError):
    """{which worker, and how it ended}"""


@dataclass(frozen=True, slots=True)
class Worker:
    """The arguments of a worker process. It calls `announce` when it accepts requests.

    `supervisor`: a file descriptor that becomes readable when the supervisor has ended; None if there is
    none.
    """

    number: int
    listeners: Listeners
    shared: SharedCounts
    announce: Callable[[], None]
    supervisor: int | None = None


def supervise(
    all_listeners: Sequence[Listeners], run: Callable[[Worker], None], ready: Callable[[], None]
) -> None:
    """Runs a process for each of `all_listeners` until SIGTERM or SIGINT; each calls `run`.

    The listeners stay open here, so that connections wait while a worker is restarted. Raises WorkerFailed:
    one did not start, or did not stop in order.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    with closing(_Supervisor(all_listeners, run, before)) as workers:
        for number in range(len(all_listeners)):
            workers.start(number)
        ready()
        while (came := signal.sigwait(_AWAITED)) == signal.SIGCHLD:
            for number, status in workers.ended():
                workers.bury(number, status)
                if signal.sigtimedwait(_STOP, RESTART_SECONDS) is not None:
                    return
                workers.start(number, waits=False)
        _log.info("stopping", signal=signal.Signals(came).name)


class _Supervisor:
    """The processes. close() stops them."""

    def __init__(
        self, all_listeners: Sequence[Listeners], run: Callable[[Worker], None], mask: Iterable[int]
    ) -> None:
        self._listeners = all_listeners
        self._run = run
        self._mask = mask
        self._shared = SharedCounts(len(all_listeners))
        self._life = os.pipe()  # nothing is written: reading ends when the supervisor does
        self._numbers: dict[int, int] = {}  # by process id

    def start(self, number: int, *, waits: bool = True) -> None:
        """`waits`: whether to wait until it accepts requests. Raises WorkerFailed."""
        reading, writing = os.pipe()
        process_id = os.fork()
        if process_id == 0:
            self._become(number, writing)
        os.close(writing)
        self._numbers[process_id] = number
        has_started = not waits or os.read(reading, 1) != b""
        os.close(reading)
        if not has_started:
            del self._numbers[process_id]
            os.waitpid(process_id, 0)
            raise WorkerFailed(f"worker {number} did not start; see its message above")

    def _become(self, number: int, writing: int) -> NoReturn:
        status = 1
        try:
            os.close(self._life[1])
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            for other, listeners in enumerate(self._listeners):
                if other != number:
                    listeners.close()

            def announce() -> None:
                os.write(writing, b".")
                os.close(writing)

            self._run(Worker(number, self._listeners[number], self._shared, announce, self._life[0]))
            status = 0
        finally:  # no code of the supervisor may run in this process
            if status != 0:
                _log.error("worker failed", worker=number, exc_info=True)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def ended(self) -> Iterator[tuple[int, int]]:
        """(number, exit status or minus the signal) of each worker that has ended since the last call."""
        for process_id in list(self._numbers):
            found, status = os.waitpid(process_id, os.WNOHANG)
            if found:
                yield self._numbers.pop(process_id), os.waitstatus_to_exitcode(status)

    def bury(self, number: int, status: int) -> None:
        row = self._shared.rows[number]
        _log.error(
            "a worker ended and is restarted; its requests and records in memory are lost",
            worker=number,
            exit_status=status,
            requests_in_flight=int(row[IN_FLIGHT]),
            records_queued=int(row[QUEUED]),
        )
        self._shared.bury(number)

    def close(self) -> None:
        """Raises WorkerFailed."""
        for listeners in self._listeners:
            listeners.close()  # otherwise connections would wait here for stopped workers
        for process_id in self._numbers:
            os.kill(process_id, signal.SIGTERM)
        ended = {
            number: os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])
            for process_id, number in self._numbers.items()
        }
        for end in self._life:
            os.close(end)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        if failed := [number for number, status in ended.items() if status not in _CLEAN]:
            raise WorkerFailed(f"workers {failed} did not stop in order; see their messages above")

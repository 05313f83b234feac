"""Serves until a signal arrives, and then exits within a time limit, whatever hangs.

The event loop runs on a thread of its own. The main thread handles the signals: it can wait for the
other thread with a deadline, and then do what must be done in any case.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import structlog
import uvicorn

REQUESTS_SECONDS: Final = 8  # for requests that run when the signal arrives
STOP_SECONDS: Final = 15.0  # for everything that is stopped in order
EXIT_SECONDS: Final = 5.0  # for threads of requests that nobody waits for any more
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_log = structlog.get_logger(__name__)


def serve(server: uvicorn.Server, listener: socket.socket, stop_soon: Callable[[], None]) -> bool:
    """`stop_soon` is called after a signal, and must return at once. Returns whether all ended in time.

    Raises what the server raises, SystemExit if it does not start.
    """
    with _woken_by_signals() as (sleep, wake):
        ended = _Ended(wake)
        loop = threading.Thread(target=ended.run, args=(server, listener), name="http", daemon=True)
        loop.start()
        sleep()
        stop_soon()
        server.should_exit = True
        loop.join(STOP_SECONDS)
    if loop.is_alive():
        _log.error("sidecar_did_not_stop_in_time", seconds=STOP_SECONDS, threads=_threads())
        return False
    if ended.error is not None:
        raise ended.error
    return True


def exit_within(seconds: float) -> None:
    """Ends the process with exit code 1 if it has not ended by itself by then."""
    if seconds <= 0:
        _exit_after(0)
    threading.Thread(target=_exit_after, args=(seconds,), name="exit", daemon=True).start()


def _exit_after(seconds: float) -> None:
    time.sleep(seconds)
    _log.error("process_ends_with_threads_that_hang", threads=_threads())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _threads() -> list[str]:
    """Names of the threads that run besides this one, except the watchers."""
    others = {thread.name for thread in threading.enumerate() if thread is not threading.current_thread()}
    return sorted(others - {"MainThread", "exit"})


class _Ended:
    """How the server ended."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self.error: BaseException | None = None

    def run(self, server: uvicorn.Server, listener: socket.socket) -> None:
        try:
            server.run(sockets=[listener])
        except BaseException as error:  # noqa: BLE001 (raised again, by the main thread)
            self.error = error
        finally:
            self._tell()


@contextmanager
def _woken_by_signals() -> Iterator[tuple[Callable[[], object], Callable[[], None]]]:
    """Yields (sleep, wake): SIGTERM and Ctrl-C also end the sleep, and do nothing else meanwhile.

    It uses a pipe: a signal handler may run on the main thread at any moment, and must not take a lock.
    """
    reading, writing = os.pipe()

    def wake(*_: object) -> None:
        os.write(writing, b".")

    before = {number: signal.signal(number, wake) for number in _SIGNALS}
    try:
        yield lambda: os.read(reading, 1), wake
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""The command line."""

from __future__ import annotations

import os
import signal
import sys


def _end(number: int, _frame: object) -> None:
    if os.getpid() == 1:
        sys.exit(128 + number)
    signal.signal(number, signal.SIG_DFL)  # a process that the first one has forked ends as any other
    os.kill(os.getpid(), number)


if os.getpid() == 1:  # in a container; the kernel drops a signal that this process does not handle
    signal.signal(signal.SIGTERM, _end)

try:  # loading takes a second, and longer on a busy machine
    from driftguard.cli.main import app, main
except KeyboardInterrupt:
    sys.exit(130)

__all__ = ["app", "main"]

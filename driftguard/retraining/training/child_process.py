"""`python -m driftguard.retraining.training.child_process COMMAND`: it never outlives its starter.

The starter holds the other end of stdin and never writes to it. When the starter dies, however it dies,
the kernel closes that end, and the whole process group of this process (made with start_new_session) is
killed. A pipe works on every POSIX system; a parent-death signal is Linux only, and is tied to a thread.
Where this process alone is killed, the starter kills the rest of the group.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO

_TERMINATE_SECONDS = 5.0


@contextmanager
def tethered(
    command: Sequence[str],
    output: int | IO[bytes],
    errors: int | IO[bytes],
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the command in a process group of its own. When the `with` block is left while the command runs,
    the group gets SIGTERM, and SIGKILL where the command has not ended 5 s later."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "driftguard.retraining.training.child_process", *command],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=errors,
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _end(process)


def was_killed(process: subprocess.Popen[bytes]) -> bool:
    """Whether this process itself was ended by a signal, so that the command may go on without it."""
    return (process.poll() or 0) < 0


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_TERMINATE_SECONDS)
    if process.poll() is None or was_killed(process):
        with suppress(ProcessLookupError):  # the command ended with it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _kill_group_at_end_of_input() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


def main() -> int:
    """The command's exit code (128 + signal where one ended it)."""
    if os.getpgid(0) != os.getpid():
        print("error: this process must lead its own process group (start_new_session)", file=sys.stderr)
        return 2
    # The command gets it too, and may need some time; this process ends when the command has ended.
    signal.signal(signal.SIGTERM, lambda *_: None)
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    threading.Thread(target=_kill_group_at_end_of_input, daemon=True).start()
    code = child.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())

"""Runs retraining.promote_command: without a shell, with the order in its environment, as a child process."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import IO, Final

from driftguard.masking import storable
from driftguard.retraining.engines.order import Order, PromotionStopped, Reply
from driftguard.retraining.training.child_process import tethered
from driftguard.settings import PREFIX

OUTPUT_CHARACTERS: Final = 8_000  # the last ones are kept
_LINE_CHARACTERS: Final = 300
_POLL_SECONDS: Final = 0.1


def run(
    command: Sequence[str], order: Order, timeout_seconds: float, should_stop: Callable[[], bool]
) -> Reply:
    """A refusal where it cannot be started, ends with another status than 0, or takes too long.

    Raises PromotionStopped. The command gets the environment without the variables that configure DriftGuard:
    they may hold keys.
    """
    if shutil.which(command[0]) is None:
        return Reply("", f"retraining.promote_command: {command[0]} is missing or not executable")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    try:
        # A file, not a pipe: a process that the command leaves running could keep a pipe open.
        with tempfile.TemporaryFile() as printed:
            with tethered(command, printed, subprocess.STDOUT, inherited | order.environment) as process:
                code = _wait(process, timeout_seconds, should_stop)
            output = _end_of(printed)
    except OSError as error:  # no temporary directory on a full or read-only disk, no memory for a process
        return Reply("", f"retraining.promote_command cannot be run: {error}")
    if code == 0:
        return Reply(output)
    said = output.strip().splitlines()[-1:] or ["(it printed nothing)"]
    how = f"ended with status {code}" if code is not None else f"did not end within {timeout_seconds:g} s"
    return Reply(output, f"retraining.promote_command {how}: {said[0][-_LINE_CHARACTERS:]}")


def _wait(
    process: subprocess.Popen[bytes], timeout_seconds: float, should_stop: Callable[[], bool]
) -> int | None:
    """The exit status; None: it takes too long."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        if should_stop():
            raise PromotionStopped("stopped on request while retraining.promote_command ran")
        try:
            return process.wait(min(_POLL_SECONDS, timeout_seconds))
        except subprocess.TimeoutExpired:
            continue
    return None


def _end_of(printed: IO[bytes]) -> str:
    size = printed.seek(0, os.SEEK_END)
    printed.seek(max(0, size - OUTPUT_CHARACTERS))
    return storable(printed.read().decode(errors="replace"))

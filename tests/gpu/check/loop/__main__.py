"""Measures the loop in a process of its own, so that a kernel that fails breaks only this process.

    python -m tests.gpu.check.loop --state FILE [--seconds S] [--extent full|quick|tiny]

Parts that FILE names as settled are not tried again. Exit status: 0 all are settled, 3 the device is lost and
another process has to go on.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import sys
import time
from functools import partial
from pathlib import Path

import torch

from tests.gpu.check.loop import parts, results
from tests.gpu.check.loop.models import Models
from tests.gpu.check.loop.running import DEVICE_LOST

SECONDS_FOR_A_PART = 120.0

_started = time.monotonic()


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.enable_cudnn_sdp(
        False
    )  # as the engine has it, so that no peer waits for its plans either
    extent = {"full": parts.full, "quick": parts.quick, "tiny": parts.tiny}[options.extent](device)
    found = results.read(options.state)
    found.models = extent.setting.pair.name
    run = parts.Measurement(
        extent,
        Models(extent.setting, say),
        found,
        keep=partial(found.save, options.state),
        out_of_time=lambda: time.monotonic() - _started > options.seconds,
        say=say,
    )
    for name, part in parts.PARTS.items():
        if name in found.settled:
            continue
        found.running = name
        run.keep()
        survived = _try(name, part, run)
        found.settled.append(name)
        found.running = None
        run.keep()
        if not survived:
            return DEVICE_LOST
    return 0


def say(line: str) -> None:
    print(f"  [{time.monotonic() - _started:5.1f} s] {line}", flush=True)


def _try(name: str, part: parts.Part, run: parts.Measurement) -> bool:
    """False: nothing more can be measured by this process."""
    if run.late(name):
        return True
    # A kernel that never ends cannot be interrupted by this process: it ends, and prints where it was.
    faulthandler.dump_traceback_later(SECONDS_FOR_A_PART, exit=True)
    try:
        part(run)
    except Exception as problem:  # noqa: BLE001 - whatever breaks one part, the others are measured
        lines = f"{type(problem).__name__}: {problem}".splitlines()
        run.found.failures.append(f"{name}: {lines[0][:400]}")
        say(f"{name} FAILED: {lines[0][:400]}")
    finally:
        faulthandler.cancel_dump_traceback_later()
    gc.collect()
    return not run.device_is_lost()


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.check.loop",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--extent", choices=("full", "quick", "tiny"), default="full")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

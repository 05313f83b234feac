"""Builds, tests and measures the engine's CUDA kernels and loop on the GPU of this machine: `make gpu-check`.

    PYTHONPATH=.:engine:engine/training python -m tests.gpu.check [--output DIR] [--second | --only PART ...]

Needs Python 3.11 or newer with torch, transformers, numpy, scipy, pytest and cuda-bindings; installs nothing.
Every part runs in a process of its own, those that tell the most first, and keeps each finding at once in
DIR/<time>.jsonl; DIR/<time>.md is written from that after each part.
Exit status: 0 all checks passed, 1 one failed, 2 nothing could be checked here.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tests.gpu.check import report, rows
from tests.gpu.check.parts import BUILD, FIRST, PARTS, SECOND, WHOLE, Part
from tests.gpu.check.rows import Begun, BuildTime, Ended, LeftOut
from tests.gpu.check.run import DEVICE_LOST, FAILED, NO_DEVICE

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "engine" / "bench" / "results"
LEAST_SECONDS = 15.0  # less is not enough to import torch and to begin
GRACE_SECONDS = 8.0  # behind its limit a part is ended from outside

# Runs a part for so many seconds: its exit status, or None where it had to be ended.
RunPart = Callable[[Part, Path, float], int | None]


@dataclass(frozen=True, slots=True)
class Check:
    """One call. file: without its suffix. now: seconds, as time.monotonic counts."""

    parts: Sequence[Part]
    seconds: float
    file: Path
    run_part: RunPart
    now: Callable[[], float] = time.monotonic

    @property
    def rows_path(self) -> Path:
        return self.file.with_suffix(".jsonl")

    def run(self) -> int:
        """The exit status of the program."""
        started = self.now()
        end = started + self.seconds
        for part in self.parts:
            seconds = min(part.limit_seconds, end - self.now() - GRACE_SECONDS)
            if seconds < LEAST_SECONDS:
                rows.append(self.rows_path, LeftOut(part.name))
                continue
            say(f"{part.name}: at most {seconds:.0f} s")
            rows.append(self.rows_path, Begun(part.name, self.now() - started, seconds))
            begun = self.now()
            status = self.run_part(part, self.rows_path, seconds)
            took = self.now() - begun
            if status == NO_DEVICE:
                self.rows_path.unlink()
                print("Nothing was checked and nothing was written.", file=sys.stderr)
                return 2
            ended = Ended(part.name, took, _outcome(status, took), failed=status != 0)
            rows.append(self.rows_path, ended)
            say(f"{part.name}: {ended.outcome}, {took:.0f} s")
            self.write_document()
            if part is BUILD and status == FAILED and not rows.read(self.rows_path).of(BuildTime):
                break  # there are no kernels
        print(f"\n{self.write_document()}", flush=True)
        failed = bool(rows.read(self.rows_path).failures)
        say(f"{'FAILED' if failed else 'all checks passed'}; kept in {self.rows_path} and beside it as .md")
        return 1 if failed else 0

    def write_document(self) -> str:
        text = report.document(rows.read(self.rows_path), self.file.name)
        self.file.with_suffix(".md").write_text(text, encoding="utf-8")
        return text


def say(line: str) -> None:
    print(f"[{datetime.now(UTC):%H:%M:%S}] {line}", flush=True)


def run_part(part: Part, path: Path, seconds: float) -> int | None:
    """In a process group of its own, which is ended whole: see `RunPart`."""
    command = [sys.executable, "-m", "tests.gpu.check.part", part.name]
    command += ["--rows", str(path), "--seconds", f"{seconds:.1f}"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True) as process:
        try:
            return process.wait(seconds + GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):  # nothing of it is left
                os.killpg(process.pid, signal.SIGKILL)


def _outcome(status: int | None, seconds: float) -> str:
    match status:
        case None:
            return f"ended after {seconds:.0f} s, its limit"
        case 0:
            return "done"
        case _ if status == FAILED:
            return "something of it failed"
        case _ if status == DEVICE_LOST:
            return "the device is lost"
        case _ if status < 0:
            return f"its process was ended by {signal.Signals(-status).name}"
        case _:
            return f"its process ended with status {status}"


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    chosen: Sequence[Part] = SECOND if options.second else FIRST
    if options.only:
        chosen = tuple(PARTS[name] for name in dict.fromkeys([BUILD.name, *options.only]))
    options.output.mkdir(parents=True, exist_ok=True)
    file = options.output / f"{datetime.now(UTC):%Y-%m-%d-%H%M%S}"
    with tempfile.TemporaryDirectory(prefix="driftguard-kernels-") as cache:
        os.environ["DRIFTGUARD_CACHE_DIR"] = cache  # empty, so that the build is timed
        return Check(chosen, options.seconds, file, run_part).run()


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="where findings are kept (%(default)s)")
    parser.add_argument("--seconds", type=float, default=WHOLE, help="for everything (%(default)g)")
    chosen = parser.add_mutually_exclusive_group()
    names = ", ".join(part.name for part in SECOND[1:])
    chosen.add_argument("--second", action="store_true", help=f"what one call has no time for: {names}")
    chosen.add_argument(
        "--only", nargs="+", choices=[*PARTS], metavar="PART", help=f"of {', '.join(PARTS)}; builds first"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

"""What the device counts in four kernels, by Nsight Compute where it is installed."""

from __future__ import annotations

import csv
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.gpu.check.rows import Checked, Counters
from tests.gpu.check.run import Run

PLACES = ["/usr/local/cuda/bin", *sorted(map(str, Path("/opt/nvidia/nsight-compute").glob("*")))]
NOT_AVAILABLE = "not available: ncu (Nsight Compute) is neither on PATH nor where it is installed"
STALLS = (
    "long_scoreboard",
    "short_scoreboard",
    "wait",
    "math_pipe_throttle",
    "lg_throttle",
    "barrier",
    "no_instruction",
)
METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "lts__t_sectors_op_read_lookup_hit.sum",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "smsp__inst_executed.sum",
    "launch__registers_per_thread",
    *(f"smsp__average_warps_issue_stalled_{why}_per_issue_active.ratio" for why in STALLS),
)


def counters(run: Run) -> None:
    path = os.pathsep.join([os.environ.get("PATH", ""), *PLACES])
    program = shutil.which("ncu", path=path)
    if program is None:
        run.add(Checked("counters", NOT_AVAILABLE, failed=False))
        return
    # The clocks belong to whoever else uses the machine: they stay as they are.
    command = [program, "--clock-control", "none", "--csv", "--profile-from-start", "off"]
    command += ["--metrics", ",".join(METRICS), sys.executable, "-m", "tests.gpu.check.counted"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=max(1.0, run.seconds_left), check=False
        )
    except subprocess.TimeoutExpired as late:
        run.add(Checked("counters", f"not finished in {late.timeout:.0f} s", failed=False))
        return
    found = list(read(done.stdout))
    for row in found:
        run.add(row)
        run.say(f"{row.kernel} ({row.what}): {row.values}")
    if not found:
        tail = " / ".join((done.stdout + done.stderr).strip().splitlines()[-6:])
        # The tool refuses some devices and virtual machines; that says nothing about the kernels.
        run.add(
            Checked(
                "counters", f"not available: ncu ended with status {done.returncode}: {tail}", failed=False
            )
        )


def read(text: str) -> Iterator[Counters]:
    """The launches of ncu's CSV, which follows lines of its own."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    launches: dict[str, tuple[str, str, dict[str, float]]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines))):
        what = f"grid {row['Grid Size']}, block {row['Block Size']}"
        *_, values = launches.setdefault(row["ID"], (row["Kernel Name"], what, {}))
        try:
            value = float(row["Metric Value"].replace(",", ""))
        except ValueError:  # "n/a": the device does not count it
            continue
        values[f"{row['Metric Name']} [{row['Metric Unit']}]"] = value
    for kernel, what, values in launches.values():
        yield Counters(kernel, what, values)

"""The benchmarks of the engine and the planted faults run to their end: what they say is not asserted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.diagnosis.engine_figures import PLANTS, planted

ENGINE_BENCH = Path(__file__).parents[2] / "engine" / "bench"
SMALLEST = {
    "bench_adaptive_k.py": "--concurrency 1 --drafts good --rounds 1 --learning-rounds 1 --max-tokens 24",
    "bench_decode.py": "--concurrency 1 --temperature 1 --repeats 1 --max-tokens 8",
    "bench_overhead.py": "--batch 1",
    "bench_prefix.py": "--shared 64 --repeats 1",
    "bench_telemetry.py": "--requests 2 --tokens 2 --pairs 6",
    "bench_verify.py": "--batch 1",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.name for path in ENGINE_BENCH.glob("bench_*.py")))
def test_a_benchmark_of_the_engine_ends_with_its_table(name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ENGINE_BENCH / name), *SMALLEST[name].split()],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("\n") >= 2


@pytest.mark.parametrize("name", PLANTS)
def test_a_fault_can_be_planted_in_the_engine(name: str) -> None:
    with planted(PLANTS[name]) as engine:
        assert engine.target_name == "target"

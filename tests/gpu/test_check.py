"""`make gpu-check` where there is no GPU, and what it computes and writes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driftguard_engine.kernels.cuda.launcher import Argument, Size
from driftguard_engine.kernels.reference.sampling import SamplingBatch
from driftguard_engine.kernels.verify import SamplingTensors, Workspace

from tests.gpu.check import linear_times, peers, report, sanitize, suite
from tests.gpu.check.benchmarks import Measured, SamplingTime, VerifyTime
from tests.gpu.check.linear_times import Layer, LinearTime
from tests.gpu.check.peers import Peer, PeerTime
from tests.gpu.check.reaches import reaches
from tests.gpu.check.workload import Batch, Only, floor_bytes

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so_and_fails() -> None:
    before = sorted(report.RESULTS.glob("*"))
    done = subprocess.run(
        ["make", "gpu-check", f"PYTHON={sys.executable}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "gpu-check needs a GPU: torch" in done.stderr
    assert "Nothing was checked and nothing was written." in done.stderr
    assert "gpu-check] Error 2" in done.stderr
    assert done.returncode == 2
    assert sorted(report.RESULTS.glob("*")) == before


def test_the_floor_is_the_targets_rows_and_one_of_the_drafts() -> None:
    assert floor_bytes(1, 4, size=128_256) == (5 + 1) * 128_256 * 2
    assert floor_bytes(64, 8, size=1000) == 64 * 10 * 1000 * 2


class Recorder:
    def __init__(self) -> None:
        self.launched: list[str] = []

    def launch(self, kernel: str, grid: Size, block: int, arguments: Sequence[Argument]) -> None:
        self.launched.append(kernel)


def batch() -> Batch:
    """Two requests whose drafts are what the target wants, over 50 tokens."""
    target = torch.full((2, 4, 50), -20.0)
    target[..., 7] = 20.0
    sampling = SamplingBatch(np.ones(2), np.zeros(2, np.int64), np.ones(2), np.arange(2))
    space = Workspace.empty(2, 3, 50, CPU)
    space.draft_tokens.fill_(7)
    lengths = torch.full((2,), 3, dtype=torch.int32)
    settings = SamplingTensors.of(sampling, np.arange(2), 50, CPU)
    return Batch(target.bfloat16(), target[:, :3].bfloat16(), lengths, settings, space)


def test_the_floor_of_a_linear_layer_is_its_weights_its_input_and_its_output() -> None:
    assert linear_times.floor_bytes(Layer("", 10, 8), 3) == (80 + 3 * 8 + 3 * 10) * 2
    assert linear_times.floor_bytes(Layer("", 10, 8, gated=True), 3) == (80 + 3 * 8 + 3 * 5) * 2


def test_linear_layers_are_timed_against_torch() -> None:
    recorder, x, weight = Recorder(), torch.ones(9, 8).bfloat16(), torch.ones(16, 8).bfloat16()
    for gated in (False, True):
        layer = Layer("", 16, 8, gated)
        shapes = {
            tuple(way(recorder, layer, x)(weight).shape)
            for way in (linear_times.by_kernel, linear_times.by_library)
        }
        assert shapes == {(9, 8 if gated else 16)}
    assert recorder.launched == ["linear_2_bf16", "linear_gated_2_bf16", "gate_bf16"]


def test_one_kernel_of_a_verification_is_timed_alone() -> None:
    recorder = Recorder()
    batch().verify(Only(recorder, "verify_chain"))
    assert recorder.launched == ["verify_chain_bf16"]
    batch().verify(recorder)
    assert recorder.launched[1:] == ["row_statistics_bf16", "verify_chain_bf16"]


def test_the_plain_peer_verifies() -> None:
    found: Any = peers.plain_torch()(batch())
    assert [values.tolist() for values in found] == [[3, 3], [7, 7]]


def test_a_peer_that_is_not_there_or_breaks_is_no_failure() -> None:
    def absent() -> peers.Verify:
        raise ImportError("nowhere")

    def changed(given: Batch) -> object:
        raise TypeError("unexpected argument\nmore")

    assert peers.measure(Peer("a", absent), [batch()]) == PeerTime("a", None, "not installed")
    broken = peers.measure(Peer("b", lambda: changed, captured=False), [batch()])
    assert broken == PeerTime("b", None, "cannot be called: TypeError: unexpected argument")
    single = peers.measure(Peer("c", absent, most_batch=1), [batch()])
    assert single.note == "one request at a time: measured up to 1"


def measured() -> Measured:
    def row(batch: int, cold: float, floor: float, peer: float | None) -> VerifyTime:
        times = [PeerTime("plain torch", peer, "in a CUDA graph"), PeerTime("vLLM", None, "not installed")]
        parts = {"row_statistics": 1.0, "verify_chain": 2.0}
        return VerifyTime(batch, 4, cold, cold, floor, int(floor * 4e6), 2.5, parts, times)

    return Measured(
        4e12,
        [row(1, 9.0, 0.4, 40.0), row(64, 30.0, 25.0, 120.0), row(128, 80.0, 50.0, 900.0)],
        [LinearTime(Layer("output", 4096, 4096), 5, 10.0, 16.0, 8.0)],
        [SamplingTime("top-k 50", 8, 4, 20.0, 10.0, 0.5)],
        ["greedy, B = 64"],
    )


def test_reaches_are_judged_by_the_worst_row() -> None:
    verdicts = {(one.what, one.reach): one for one in reaches(measured())}
    floor = verdicts["verify, B >= 64, V = 128k", "at most 1.5 times the floor"]
    assert floor.verdict == "not met"
    assert floor.measured == "1.20 (B 64, K 4), 1.60 (B 128, K 4); the worst 1.60"
    assert verdicts["verify, B <= 8", "at most 12 microseconds, cold"].verdict == "met"
    plain = verdicts["verify, B >= 64, against plain torch", "at least 5x faster"]
    assert (plain.measured, plain.verdict) == ("4.0x to 11.2x", "not met")
    absent = verdicts["verify, B <= 8, against vLLM", "at least 2x faster"]
    assert (absent.measured, absent.verdict) == ("not yet measured: not installed", "not yet measured")


def test_a_document_has_only_numbers_that_were_measured() -> None:
    nothing = report.document(report.Findings([("GPU", "none")]), "nothing")
    assert {one.verdict for one in reaches(Measured())} == {"not yet measured"}
    assert nothing.count("Not yet measured.") == 13
    full = report.document(report.Findings([("GPU", "a|b")], measured=measured()), "full")
    assert "| GPU | a\\|b |" in full
    assert "| 64 | 4 | 30.0 | 30.0 | 100.0 | 25.0 | 1.20 | 1.0 | 2.0 | 2.50 |" in full
    assert "| output | 4096 x 4096 | 5 | 10.0 | 16.0 | 80% | 50% |" in full
    assert "| 64 | 4 | vLLM | not yet measured |  | not installed |" in full
    assert "Not yet measured, out of time: greedy, B = 64." in full
    assert report.path_of(date(2026, 1, 2), "nvidia-h100").name == "2026-01-02-nvidia-h100.md"


def test_memory_checks_without_the_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sanitize, "PLACES", [])
    outcomes = sanitize.run(lambda: 100.0, lambda line: None)
    assert [failed for *_, failed in outcomes] == [False] * 4
    assert {outcome for _, outcome, _ in outcomes} == {sanitize.NOT_AVAILABLE}


def test_behind_a_test_that_ends_its_process_the_next_ones_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").write_text("from tests.gpu.begun import *", encoding="utf-8")
    (tmp_path / "test_it.py").write_text(
        "import os\n"
        "def test_a(): pass\n"
        "def test_b(): os.abort()\n"
        "def test_c(request): request.session.shouldstop = 'the device is lost'\n"
        "def test_d(): raise ValueError\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "pytest", "test_it.py", "-c", os.devnull, "-v", "-p", "no:cacheprovider"]
    monkeypatch.setattr(suite, "_command", lambda quick: [*command, "--rootdir", str(tmp_path)])
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    outcome, failed = suite.run(False, 100.0, lambda line: None)
    assert failed
    first, second, third = outcome.split("; then ")
    assert first == "ended by SIGABRT, at: test_it.py::test_b"
    assert second.startswith("1 passed, 2 deselected")
    assert second.endswith("Interrupted: the device is lost")
    assert third.startswith("1 failed, 3 deselected")

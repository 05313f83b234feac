"""`make gpu-check` where there is no GPU: its order, its files, and what it computes and writes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from driftguard_engine.kernels.cuda.launcher import Argument, Size
from driftguard_engine.kernels.reference.sampling import SamplingBatch
from driftguard_engine.kernels.verify import SamplingTensors, Workspace
from torch import Tensor

from tests.gpu.check import __main__ as program
from tests.gpu.check import counters, linear_times, parts, peers, report, rows, sanitize, suite
from tests.gpu.check.linear_times import Layer
from tests.gpu.check.parts import FIRST, SECOND, WHOLE, Part
from tests.gpu.check.peers import Peer
from tests.gpu.check.reaches import reaches
from tests.gpu.check.rows import (
    Bandwidth,
    Begun,
    Checked,
    Counters,
    Ended,
    Findings,
    LeftOut,
    LinearTime,
    Machine,
    PeerTime,
    SamplingTime,
    Served,
    SpeculativeTime,
    VerifyTime,
)
from tests.gpu.check.run import DEVICE_LOST, FAILED, NO_DEVICE, NoDevice, Run
from tests.gpu.check.workload import Batch, Only, floor_bytes

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so_and_fails(tmp_path: Path) -> None:
    done = subprocess.run(
        ["make", "gpu-check", f"PYTHON={sys.executable}", f"ARGS=--output {tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "gpu-check needs a GPU: torch" in done.stderr
    assert "Nothing was checked and nothing was written." in done.stderr
    assert "gpu-check] Error 2" in done.stderr
    assert done.returncode == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_it_runs_where_the_sidecar_and_the_engine_s_server_are_not_installed() -> None:
    """Whose packages a machine that is lent for ten minutes does not have: each module can be imported."""
    absent = ["alembic", "fastapi", "msgspec", "procrastinate", "prometheus_client", "sqlalchemy", "uvicorn"]
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / "tests" / "gpu").rglob("*.py"))
        if path.name not in ("__init__.py", "test_check.py", "test_loop_check.py")
    ]
    program = f"import sys; sys.modules.update(dict.fromkeys({absent}))\n" + "".join(
        f"import {module}\n" for module in modules
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


class Killed(BaseException):
    """The machine is taken back: nothing after this runs."""


@dataclass
class Rehearsal:
    """Parts that take as long as they are told by this clock, and end so; each keeps two findings.

    killed_at: second at which the whole program is ended.
    """

    directory: Path
    endings: dict[str, tuple[float, int | None]] = field(default_factory=dict)
    killed_at: float = 1e9
    clock: float = 1000.0
    begun: list[str] = field(default_factory=list)

    def check(self, chosen: Sequence[Part], seconds: float = WHOLE) -> program.Check:
        return program.Check(chosen, seconds, self.directory / "found", self.run_part, lambda: self.clock)

    def run_part(self, part: Part, path: Path, seconds: float) -> int | None:
        self.begun.append(part.name)
        rows.append(path, Checked(f"first of {part.name}", "passed", failed=False))
        took, status = self.endings.get(part.name, (10.0, 0))
        self.clock += min(took, seconds)
        if self.clock - 1000 > self.killed_at:
            raise Killed
        rows.append(path, Checked(f"last of {part.name}", "passed", failed=False))
        return status if took <= seconds else None

    def found(self) -> Findings:
        for line in (self.directory / "found.jsonl").read_text(encoding="utf-8").splitlines():
            assert json.loads(line)["row"]
        return rows.read(self.directory / "found.jsonl")

    def document(self) -> str:
        return (self.directory / "found.md").read_text(encoding="utf-8")


def test_the_parts_come_in_the_order_of_what_they_tell(tmp_path: Path) -> None:
    rehearsal = Rehearsal(tmp_path)
    assert rehearsal.check(FIRST).run() == 0
    assert rehearsal.begun == [
        "build",
        "self-tests",
        "equality",
        "verification",
        "linear-layers",
        "plain-decode",
        "sweep",
        "peers",
        "counters",
        "tests",
    ]
    assert [row.at_seconds for row in rehearsal.found().of(Begun)] == [10.0 * index for index in range(10)]
    assert not rehearsal.found().failures
    assert "| last of tests |  | passed |" in rehearsal.document()


def test_every_part_that_is_named_exists() -> None:
    """In both calls; the first fits into the time of one, with time left for the tests."""
    for named in parts.PARTS.values():
        module, function = named.function.split(":")
        assert callable(getattr(import_module(module), function))
    assert sum(part.limit_seconds for part in FIRST[:-1]) <= WHOLE - 60


def test_a_run_that_is_killed_keeps_every_finding(tmp_path: Path) -> None:
    rehearsal = Rehearsal(tmp_path, dict.fromkeys(parts.PARTS, (85.0, 0)), killed_at=400)
    with pytest.raises(Killed):
        rehearsal.check(FIRST, 600).run()
    found = rehearsal.found()
    begun, ended = [row.part for row in found.of(Begun)], [row.part for row in found.of(Ended)]
    assert (len(begun), begun[:-1]) == (len(ended) + 1, ended)
    assert found.of(Checked)[-1].what == f"first of {begun[-1]}"
    document = rehearsal.document()  # of the part before
    assert f"last of {ended[-1]}" in document
    assert f"| {begun[-1]} |" in report.document(found, "again").split("did not end")[0]


def test_behind_a_part_that_loses_the_device_or_never_ends_the_next_ones_run(tmp_path: Path) -> None:
    endings: dict[str, tuple[float, int | None]] = {
        "self-tests": (5, FAILED),
        "equality": (1000, 0),
        "verification": (20, DEVICE_LOST),
        "linear-layers": (20, -11),
        "sweep": (20, 1),
    }
    rehearsal = Rehearsal(tmp_path, endings)
    assert rehearsal.check(FIRST).run() == 1
    assert rehearsal.begun == [part.name for part in FIRST]
    outcomes = {row.part: row.outcome for row in rehearsal.found().of(Ended)}
    assert outcomes == {
        "build": "done",
        "self-tests": "something of it failed",
        "equality": "ended after 100 s, its limit",
        "verification": "the device is lost",
        "linear-layers": "its process was ended by SIGSEGV",
        "plain-decode": "done",
        "sweep": "its process ended with status 1",
        "peers": "done",
        "counters": "done",
        "tests": "done",
    }
    assert len(rehearsal.found().failures) == 5


def test_what_there_is_no_time_for_is_named(tmp_path: Path) -> None:
    rehearsal = Rehearsal(tmp_path, dict.fromkeys(parts.PARTS, (1000.0, 0)))
    assert rehearsal.check(FIRST, 220).run() == 1
    assert rehearsal.begun == ["build", "self-tests", "equality", "verification"]
    assert rehearsal.clock - 1000 <= 220
    assert [row.what for row in rehearsal.found().of(LeftOut)] == [part.name for part in FIRST[4:]]
    assert "out of time: linear-layers; plain-decode;" in rehearsal.document()


def test_nothing_is_run_behind_kernels_that_do_not_build(tmp_path: Path) -> None:
    rehearsal = Rehearsal(tmp_path, {"build": (10, FAILED)})
    assert rehearsal.check(SECOND).run() == 1
    assert rehearsal.begun == ["build"]
    nothing = Rehearsal(tmp_path, {"build": (10, NO_DEVICE)})
    (tmp_path / "found.jsonl").unlink()
    assert nothing.check(FIRST).run() == 2
    assert not (tmp_path / "found.jsonl").exists()


BREAKS = "DRIFTGUARD_TESTED_PART"
SLEEPS = "DRIFTGUARD_TESTED_PART_SLEEPS"  # seconds, by which a test knows its own process


def broken(run: Run) -> None:
    """A part for the tests below, in a process of its own."""
    run.say("begun")
    run.add(Checked("before", "passed", failed=False))
    match os.environ[BREAKS]:
        case "hangs":
            subprocess.run(["sleep", os.environ[SLEEPS]], check=True)
        case "dies":
            os.abort()
        case "raises":
            raise RuntimeError("an illegal memory access\nmore")
        case "nothing there":
            raise NoDevice("no device")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "expected"),
    [("hangs", None), ("dies", -6), ("raises", FAILED), ("nothing there", NO_DEVICE), ("ends", 0)],
)
def test_a_part_runs_in_a_process_that_is_ended_whole(
    how: str, expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what hangs is a process that it has started."""
    (tmp_path / "sitecustomize.py").write_text(
        "from tests.gpu.check import parts\n"
        "parts.PARTS['broken'] = parts.Part('broken', 'tests.gpu.test_check:broken', 60)\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv(BREAKS, how)
    seconds = f"600.{os.getpid()}"
    monkeypatch.setenv(SLEEPS, seconds)
    monkeypatch.setattr(program, "GRACE_SECONDS", 0.0)
    found = tmp_path / "found.jsonl"
    limit = 20.0 if how == "hangs" else 200.0
    assert program.run_part(Part("broken", "", limit), found, limit) == expected
    told = [row.what for row in rows.read(found).of(Checked)]
    assert told == (["before", "broken"] if how == "raises" else ["before"])
    left = subprocess.run(["pgrep", "-f", f"^sleep {seconds}$"], capture_output=True, text=True, check=False)
    assert left.stdout == ""


def test_a_line_that_was_not_written_whole_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "found.jsonl"
    rows.append(path, Begun("build", 0, 10))
    with path.open("a", encoding="utf-8") as lines:
        lines.write('{"row": "Ended", "part": "bu')
    found = rows.read(path)
    assert found.of(Begun) == [Begun("build", 0, 10)]
    (failure,) = found.failures
    assert failure.startswith("found.jsonl, line 2: is unreadable")


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    served = Served(1.5, 10, 30, 20, 25, 500.0)
    given = [
        *measured().rows,
        SpeculativeTime(0.8, 1, "4", served, served, "note"),
        Counters("row_statistics_bf16", "grid", {"time [ns]": 12.5}),
        LeftOut("all the rest"),
    ]
    for row in given:
        rows.append(tmp_path / "found.jsonl", row)
    assert list(rows.read(tmp_path / "found.jsonl").rows) == given


def test_counters_are_read_from_what_ncu_prints() -> None:
    head = '"ID","Kernel Name","Block Size","Grid Size","Metric Name","Metric Unit","Metric Value"'
    text = "\n".join(
        [
            "==PROF== Connected to process 7",
            head,
            '"0","row_statistics_bf16","(128, 1, 1)","(9, 1, 1)","gpu__time_duration.sum","ns","1,234"',
            '"0","row_statistics_bf16","(128, 1, 1)","(9, 1, 1)","dram__bytes_read.sum","Mbyte","n/a"',
            '"1","verify_chain_bf16","(256, 1, 1)","(64, 2, 1)","gpu__time_duration.sum","us","2.5"',
        ]
    )
    assert list(counters.read(text)) == [
        Counters(
            "row_statistics_bf16", "grid (9, 1, 1), block (128, 1, 1)", {"gpu__time_duration.sum [ns]": 1234}
        ),
        Counters(
            "verify_chain_bf16", "grid (64, 2, 1), block (256, 1, 1)", {"gpu__time_duration.sum [us]": 2.5}
        ),
    ]
    assert list(counters.read("==ERROR== no permission\n")) == []


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


@pytest.mark.parametrize("load", [peers.plain_torch, peers.transformers_assisted])
def test_a_peer_accepts_what_the_target_wants(load: Callable[[], peers.Prepare]) -> None:
    assert load()(batch())().tolist() == [3, 3]


def test_the_plain_peer_draws_the_token_behind_the_accepted() -> None:
    accepted, last = peers.verify_plainly(batch())
    assert (accepted.tolist(), last.tolist()) == ([3, 3], [7, 7])


def test_a_peer_that_is_not_there_or_breaks_is_no_failure() -> None:
    def absent() -> peers.Prepare:
        raise ImportError("nowhere")

    def broken() -> Tensor:
        raise TypeError("unexpected argument\nmore")

    def note(load: Callable[[], peers.Prepare], most: int = 2) -> str:
        peer = Peer("a peer", "nothing-of-that-name", load, "all", most_batch=most)
        row = peers.time_peer(peer, [batch()], 9.0)
        assert row == PeerTime(2, 3, "a peer", None, None, row.note)
        return row.note

    assert note(absent) == "not installed"
    assert note(lambda: lambda given: broken) == "cannot be called: TypeError: unexpected argument"
    assert note(absent, most=1) == "one request at a time: measured up to 1"


def test_a_peer_without_the_module_that_is_called_is_not_taken_for_absent() -> None:
    def outdated() -> peers.Prepare:
        import_module("torch.of_old")
        raise AssertionError

    row = peers.time_peer(Peer("torch's", "torch", outdated, "all"), [batch()], 9.0)
    assert row.name == f"torch's {metadata.version('torch')}"
    assert row.note == "cannot be loaded: ModuleNotFoundError: No module named 'torch.of_old'"


def test_a_time_of_a_peer_has_its_version_what_is_in_it_and_what_was_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "graph_microseconds", lambda calls, replays: 6.0 * len(calls))
    given = [batch(), batch()]
    row = peers.time_peer(peers.PLAIN_TORCH, given, 4.0)
    name = f"plain torch {metadata.version('torch')}"
    assert row == PeerTime(2, 3, name, 12.0, 3.0, "softmax of both; in a CUDA graph", 3.0)
    with_last = dataclasses.replace(peers.PLAIN_TORCH, counts_last=True)
    assert peers.time_peer(with_last, given, 4.0).accepted == 2.0


@pytest.mark.parametrize("load", [peers.flashinfer_chain, peers.sglang_rejection])
def test_a_draft_has_its_probabilities_before_the_time_of_a_peer_that_keeps_them_begins(
    load: Callable[[], peers.Prepare], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither package is here: what they would be called with."""
    called: list[dict[str, Any]] = []

    def chain(q: Tensor, tokens: Tensor, p: Tensor, **given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        called.append({"draft_probs": q, "target_probs": p, "candidates": tokens})
        return tokens, tokens, tokens

    package = SimpleNamespace(
        chain_speculative_sampling=chain,
        chain_speculative_sampling_triton=lambda **given: called.append(given),
    )
    monkeypatch.setattr(peers, "import_module", lambda name: package)
    verify = load()(batch())
    verify()
    verify()
    first, second = called
    assert first["draft_probs"] is second["draft_probs"]
    assert first["target_probs"] is not second["target_probs"]
    for probabilities, steps in ((first["draft_probs"], 3), (first["target_probs"], 4)):
        assert (probabilities.dtype, probabilities.shape) == (torch.float32, (2, steps, 50))
        assert torch.allclose(probabilities.sum(-1), torch.ones(2, steps))
    assert first["candidates"][:, -3:].tolist() == [[7, 7, 7]] * 2


def test_vllms_rows_are_the_targets_and_each_knows_its_request_and_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The package is not here: what it would be called with."""
    called: list[dict[str, Any]] = []

    def sample(**given: Any) -> tuple[None, Tensor]:
        called.append(given)
        return None, torch.tensor([4, 4])

    monkeypatch.setattr(peers, "import_module", lambda name: SimpleNamespace(rejection_sample=sample))
    given = batch()
    assert peers.vllm_rejection()(given)().tolist() == [4, 4]
    asked = called[0]
    assert torch.equal(asked["target_logits"], given.target.flatten(0, 1))
    assert asked["draft_logits"] is given.draft
    assert asked["draft_sampled"].tolist() == [0, 7, 7, 7] * 2
    assert asked["cu_num_logits"].tolist() == [0, 4, 8]
    assert asked["expanded_idx_mapping"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert asked["expanded_local_pos"].tolist() == asked["pos"].tolist() == [0, 1, 2, 3] * 2
    assert asked["num_speculative_steps"] == 3


def measured() -> Findings:
    def timed(batch: int, cold: float, floor: float, peer: float) -> tuple[VerifyTime | PeerTime, ...]:
        parts = {"row_statistics": 1.0, "verify_chain": 2.0}
        return (
            VerifyTime(batch, 4, cold, cold, floor, int(floor * 4e6), 2.5, parts),
            PeerTime(batch, 4, "plain torch", peer, peer / cold, "in a CUDA graph", 2.4),
            PeerTime(batch, 4, "vLLM", None, None, "not installed"),
        )

    return Findings(
        (
            Machine("a|b", "9.0", 132, 80, 50 * 2**20, "580", "3.12", "2.11", "13.0", "13.0"),
            Bandwidth(4e12),
            *timed(1, 9.0, 0.4, 40.0),
            *timed(64, 30.0, 25.0, 120.0),
            *timed(128, 80.0, 50.0, 77.6),
            LinearTime("output", 4096, 4096, 5, 10.0, 16.0, 8.0),
            SamplingTime("top-k 50", 8, 4, 20.0, 10.0, 0.5, {"row_cut": 3.0}),
            LeftOut("greedy, B = 64"),
        )
    )


def test_reaches_are_judged_by_the_worst_row() -> None:
    verdicts = {(one.what, one.reach): one for one in reaches(measured())}
    floor = verdicts["verify, B >= 64, V = 128k", "at most 1.5 times the floor"]
    assert floor.verdict == "not met"
    assert floor.measured == "1.20 (B 64, K 4), 1.60 (B 128, K 4); the worst 1.60"
    assert verdicts["verify, B <= 8", "at most 12 microseconds, cold"].verdict == "met"
    plain = verdicts["verify, B >= 64, against plain torch", "faster than it"]
    assert (plain.measured, plain.verdict) == ("0.97x to 4.00x", "not met")
    assert verdicts["verify, B <= 8, against plain torch", "faster than it"].verdict == "met"
    absent = verdicts["verify, B <= 8, against vLLM", "faster than it"]
    assert (absent.measured, absent.verdict) == ("not yet measured: not installed", "not yet measured")


def test_a_document_has_only_numbers_that_were_measured() -> None:
    nothing = report.document(Findings(), "nothing")
    assert {one.verdict for one in reaches(Findings())} == {"not yet measured"}
    assert nothing.count("Not yet measured.") == 16
    full = report.document(measured(), "full")
    assert "| GPU | a\\|b, compute capability 9.0 |" in full
    assert "| 64 | 4 | 30.0 | 30.0 | 100.0 | 25.0 | 1.20 | 1.0 | 2.0 | 2.50 |" in full
    assert "| output | 4096 x 4096 | 5 | 10.0 | 16.0 | 80% | 50% |" in full
    assert "| 64 | 4 | vLLM | not yet measured |  |  | not installed |" in full
    assert "| 64 | 4 | plain torch | 120.0 | 4.00 | 2.40 | in a CUDA graph |" in full
    assert "| top-k 50 | 8 | 4 | 20.0 | row_cut 3.0 | 10.0 | 0.5 | 20.00 |" in full
    assert "Not yet measured, out of time: greedy, B = 64." in full


@pytest.mark.parametrize("tool", [sanitize.sanitizers, counters.counters])
def test_a_tool_that_is_not_there_is_no_failure(
    tool: Callable[[Run], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sanitize, "PLACES", [])
    monkeypatch.setattr(counters, "PLACES", [])
    run = Run(tmp_path / "found.jsonl", 1e12)
    tool(run)
    found = run.found().of(Checked)
    assert {(row.outcome, row.failed) for row in found} <= {
        (sanitize.NOT_AVAILABLE, False),
        (counters.NOT_AVAILABLE, False),
    }
    assert found


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
    monkeypatch.setattr(suite, "_command", lambda chosen: [*command, "--rootdir", str(tmp_path)])
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    outcome, failed = suite.run_tests([], 100.0, lambda line: None)
    assert failed
    first, second, third = outcome.split("; then ")
    assert first == "ended by SIGABRT, at: test_it.py::test_b"
    assert second.startswith("1 passed, 2 deselected")
    assert second.endswith("Interrupted: the device is lost")
    assert third.startswith("1 failed, 3 deselected")

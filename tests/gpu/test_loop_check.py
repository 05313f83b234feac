"""What `make gpu-check` measures the loop with: models, counts, judgement. On the CPU, with tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from driftguard_engine.core import SpeculationCounts
from torch.nn import functional as F

from tests.gpu.check import report
from tests.gpu.check.loop import parts
from tests.gpu.check.loop.judging import loop_reaches
from tests.gpu.check.loop.models import Models, Setting
from tests.gpu.check.loop.prefixes import time_prefixes
from tests.gpu.check.loop.serving import Load, judged, serve
from tests.gpu.check.loop.synthetic import (
    LARGE,
    SMALL,
    Bigrams,
    Shape,
    cache_bytes_per_token,
    find_disturbance,
    new_module,
    weight_bytes_per_step,
)
from tests.gpu.check.loop.tracing import REST, count_waits, group_of
from tests.gpu.check.rows import (
    TRANSFORMERS,
    BatchTime,
    Breakdown,
    Checked,
    Findings,
    KernelTime,
    LeftOut,
    LoopModels,
    PeerSpeed,
    PlainTime,
    PrefixTime,
    Served,
    SpeculativeTime,
    Synchronisations,
)
from tests.gpu.check.run import Run

CPU = torch.device("cpu")
SEED = 20281


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_disturbance_is_where_the_overlap_is_the_acceptance() -> None:
    assert find_disturbance(0.2, lambda disturbance: 1 / (1 + disturbance)) == pytest.approx(4, abs=1e-3)
    with pytest.raises(ValueError, match=r"brings the acceptance down to 0\.5"):
        find_disturbance(0.5, lambda disturbance: 0.9)


@pytest.mark.parametrize("shape", [SMALL.target, SMALL.draft], ids=["target", "draft"])
def test_layers_of_random_weights_add_nothing(shape: Shape) -> None:
    """Whatever came before the newest token: what the head reads is its embedding, bit by bit."""
    bigrams = Bigrams.draw(shape.vocabulary, SMALL.draft.hidden, torch.bfloat16, CPU, SEED)
    module = new_module(shape, bigrams.signs, bigrams.successors, 32, torch.bfloat16, CPU)
    text = torch.randint(0, shape.vocabulary, (2, 20), generator=torch.Generator().manual_seed(SEED))
    with torch.no_grad():
        found, read = module(text).logits, module.model(text).last_hidden_state
    assert torch.equal(read, bigrams.signs[text].repeat(1, 1, shape.hidden // SMALL.draft.hidden))
    expected = F.linear(bigrams.signs[text].float(), bigrams.successors.float())
    torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=2**-8)
    assert all((each != 0).float().mean() > 0.9 for each in module.parameters())


def test_the_bytes_of_a_step_are_those_of_llama_3_1_8b() -> None:
    with torch.device("meta"):
        signs = torch.empty(LARGE.target.vocabulary, LARGE.draft.hidden)
        target, draft = (
            new_module(shape, signs, signs, 32, torch.bfloat16, torch.device("meta"))
            for shape in (LARGE.target, LARGE.draft)
        )
    assert weight_bytes_per_step(target) == 2 * (8_030_261_248 - 128_256 * 4096)
    assert weight_bytes_per_step(target) / weight_bytes_per_step(draft) == pytest.approx(46, abs=1)
    assert cache_bytes_per_token(LARGE.target, torch.bfloat16) == 131_072


def test_the_engine_accepts_as_many_drafts_as_was_stated() -> None:
    setting = Setting(SMALL, CPU, torch.float32, 4, 96, prompt_tokens=4)
    models = Models(setting, lambda line: None)
    engine = models.engine(0.8, 4, num_speculative_tokens=2)
    served = serve(engine, Load(4, 2, 4), steps=24, settling=2)
    assert served.tested > 100
    deviation = (0.8 * 0.2 / served.tested) ** 0.5
    assert served.acceptance == pytest.approx(0.8, abs=4 * deviation)
    assert served.tokens_per_step / 4 == pytest.approx(1 + 0.8 + 0.8**2, abs=0.5)
    plain = serve(engine, Load(2, 0, 4), steps=3, settling=1)
    assert (plain.tokens, plain.steps, plain.acceptance) == (6, 3, None)


def test_the_beginning_of_a_prompt_is_known_to_the_second_of_a_pair() -> None:
    setting = Setting(SMALL, CPU, torch.float32, 1, 96, prompt_tokens=4)
    engine = Models(setting, lambda line: None).engine(0.8, 1, prefill_chunk_tokens=8)
    timed = time_prefixes(engine, 64, pairs=1)
    assert (timed.prompt_tokens, timed.reused_tokens) == (76, 64)


def test_drafts_behind_a_rejection_were_not_tested() -> None:
    counts = SpeculationCounts()
    for accepted in (0, 2, 3, 1):
        counts.add_step(3, accepted, accepted + 1)
    assert judged(counts) == (6, 1 + 3 + 3 + 2)


def test_kernels_are_told_apart_by_their_names() -> None:
    assert {name: group_of(name) for name in ("gate_bf16", "verify_chain_bf16", "attend_fp16")} == {
        "gate_bf16": "norms, rotation, gate",
        "verify_chain_bf16": "verification and draft draws",
        "attend_fp16": "attention",
    }
    assert group_of("nvjet_tst_128x64_64x8_4x1_v_bz_TNN") == "matrix products"
    assert group_of("void cutlass::Kernel<fmha_cutlassF_bf16_aligned_64x128_rf_sm80>") == "attention"
    assert group_of("Memcpy HtoD (Pinned -> Device)") == "copies and fills"
    assert group_of("void at::native::index_elementwise_kernel<128, 4>") == REST


def test_calls_that_wait_are_told_from_those_that_do_not() -> None:
    called = [
        "cudaMemcpyAsync",
        "cudaLaunchKernel",
        "cudaEventRecord",
        "cudaGraphLaunch",
        "cuMemcpyHtoDAsync_v2",
    ]
    assert count_waits(called) == ({}, 0, 0)
    waiting = [
        "cudaStreamSynchronize",
        "cudaMemcpy",
        "cudaDeviceSynchronize",
        "cudaMemcpy",
        "cuMemcpyDtoH_v2",
    ]
    waits, readbacks, allocations = count_waits([*called, *waiting, "cudaEventSynchronize", "cudaHostAlloc"])
    assert waits == dict.fromkeys(waiting, 1) | {"cudaMemcpy": 2}
    assert (readbacks, allocations) == (1, 1)


def served(milliseconds: float, tokens_per_step: float) -> Served:
    return Served(milliseconds / 10, 100, round(100 * tokens_per_step), 80, 100, 500.0)


def speculative(stated: float, batch: int, drafts: int, tokens_per_step: float) -> SpeculativeTime:
    return SpeculativeTime(stated, batch, str(drafts), served(5.0, tokens_per_step), served(4.0, 1.0))


def measured() -> Findings:
    alone, many = speculative(0.8, 1, 6, 4.0), speculative(0.8, 64, 6, 1.2)
    return Findings(
        (
            LoopModels("tiny models"),
            PlainTime(served(4.0, 1.0), 15_000_000_000, 4e12),
            speculative(0.8, 1, 4, 3.5),
            speculative(0.8, 1, 6, 4.0),
            speculative(0.9, 1, 8, 4.5),
            PeerSpeed(TRANSFORMERS, 0.8, 100.0, "slow"),
            PeerSpeed(TRANSFORMERS, 0.8, 250.0, "fast"),
            PeerSpeed("gpt-fast", 0.8, None, "not on this machine"),
            *(BatchTime(0.8, row.batch, row.drafts, row.served, row.plain) for row in (alone, many)),
            PrefixTime(1012, 1000, 90.0, 15.0),
            Synchronisations("B = 1, K = 4", 20, None, {}, 20),
            Breakdown("B = 1, K = 0", 4.0, [KernelTime("gemv", 225, 3500.0)], {"products": 3500.0}),
            LeftOut("gpt-fast"),
            Checked("batches", "no memory", failed=True),
        )
    )


def test_the_loop_is_judged_by_its_best_k_and_its_worst_batch() -> None:
    found = {(one.what, one.reach): (one.measured, one.verdict) for one in loop_reaches(measured())}
    plain = "decoding without speculation, B = 1, 7B-cost synthetic target, bf16"
    assert found[plain, "at least 85% of bandwidth"] == ("93.8%: 4.00 ms, its bytes take 3.75 ms", "met")
    speculation = found["with speculation, acceptance 0.8", "at least 3x the own baseline"]
    assert speculation == ("3.20x, K = 6, 0.800 accepted", "met")
    assert found["with speculation, acceptance 0.9", "at least 3.8x the own baseline"][1] == "not met"
    assert (
        found["with speculation, acceptance 0.7", "at least 2.3x the own baseline"][1] == "not yet measured"
    )
    against = f"with speculation, acceptance 0.8, against {TRANSFORMERS}"
    assert found[against, "at least 4x"] == ("3.2x", "not met")
    slower = found["batch 1 to 64", "never slower than without speculation"]
    assert slower == ("3.20x (B 1, K 6), 0.96x (B 64, K 6)", "not met")
    assert found["host synchronisations per step of the loop", "0"] == ("0 (B = 1, K = 4)", "met")


def test_a_wait_or_none_counted_is_not_zero() -> None:
    def verdict(*rows: Synchronisations) -> str:
        return loop_reaches(Findings(rows))[-1].verdict

    none = Synchronisations("B = 1", 20, None, {})
    assert verdict(none) == "met"
    assert verdict(none, Synchronisations("B = 1", 20, None, {"cudaStreamSynchronize": 1})) == "not met"
    assert verdict(none, Synchronisations("B = 1", 20, "called a synchronizing operation", {})) == "not met"
    assert verdict(none, Synchronisations("B = 1", 20, None, uncounted="no profiler")) == "not yet measured"


def test_the_report_tells_the_loop_and_what_of_it_failed() -> None:
    text = report.document(measured(), "full")
    assert "| 0.8 | 0.800 | 1 | 6 | 4.00 | 5.00 | 4.00 | 800 | 250 | 3.20 |" in text
    assert "| gpt-fast | 0.8 | not yet measured |  | not on this machine |" in text
    assert "| 1012 | 1000 | 90.0 | 15.0 | 6.00 |" in text
    assert "| no kernel | 500 |" in text
    assert "| batches | FAILED | no memory |" in text
    assert "out of time: gpt-fast." in text


def test_every_part_runs_to_its_end_and_keeps_what_it_measured(tmp_path: Path) -> None:
    """On tiny models: its numbers are meaningless."""
    run = Run(tmp_path / "found.jsonl", 1e12)
    for part in (parts.plain_decode, parts.sweep, parts.adaptive_batches, parts.prefixes):
        part(run)
    found = run.found()
    assert not found.failures
    assert found.newest(PlainTime) is not None
    assert [row.drafts for row in found.of(SpeculativeTime)] == ["2", "3"]
    assert {(row.batch, row.drafts) for row in found.of(BatchTime)} >= {(1, "adaptive"), (2, "adaptive")}
    assert found.newest(PrefixTime) is not None


def test_what_of_a_part_there_is_no_time_for_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path / "found.jsonl", 0.0)
    parts.sweep(run)
    assert run.found().of(LeftOut) == [LeftOut("speculation at an acceptance of 0.8")]
    assert not run.failed

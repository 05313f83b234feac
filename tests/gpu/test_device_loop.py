"""Decoding on a device: graphs, eager steps and transformers agree, nothing waits, failures pass."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args

import pytest
import torch
from driftguard_engine.config import Device, EngineConfig, VerificationRule
from driftguard_engine.decode import placement
from driftguard_engine.decode.graphs import Runners
from driftguard_engine.decode.placement import slower_because
from driftguard_engine.decode.step import Shape, Step
from driftguard_engine.drafters.base import Drafter
from driftguard_engine.engine import Engine, lost_device
from driftguard_engine.kernels.backend import Backend, backend_of
from driftguard_engine.models.llama import LlamaModel
from torch import Tensor

from tests.engine.core.eagle3_heads import load_target, save_random_head
from tests.engine.core.test_decoder import told, traffic
from tests.engine.core.tiny import finished, new_module, request, save, serve

DEVICE: Device = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

NewEngine = Callable[..., Engine]
STEPS = 20


@pytest.fixture(scope="module")
def new_engine(tmp_path_factory: pytest.TempPathFactory) -> NewEngine:
    """by: what computes the layers; the default tiny model is none for the kernels."""
    root = tmp_path_factory.mktemp("models")
    shapes: dict[str, dict[str, Any]] = {"kernels": {"hidden_size": 64}, "torch": {}}
    for by, shape in shapes.items():
        for name, noise in (("target", 0.0), ("draft", 0.03)):
            save(root / by / name, seed=3, noise=noise, **shape)
    target = load_target(root / "kernels" / "target")
    save_random_head(root / "kernels" / "head", target, range(257), (0, 1), head_dim=16)

    def make(by: str = "kernels", **changes: Any) -> Engine:
        usual = {"ngram": None, "none": None, "eagle3": "head"}.get(changes.get("drafter", ""), "draft")
        settings: dict[str, Any] = {"max_batch": 4, "prefill_chunk_tokens": 8, "draft": usual} | changes
        draft = settings.pop("draft")
        if draft is not None:
            draft = str(root / by / draft)
        made = Engine(EngineConfig(str(root / by / "target"), draft, device=DEVICE, **settings))
        drafter = made._drafts.drafter
        by_kernels = DEVICE == "cuda" and vars(placement)["backend_of"] is backend_of
        if by_kernels and made.config.model_path == "auto" and (drafter is None or drafter.captured):
            slow = slower_because(torch.device(DEVICE), made._target.model, drafter)
            assert (slow is None) == (by == "kernels")
        return made

    return make


def failed_capture(engine: Engine) -> str | None:
    return engine._decoder.capture_failure


@pytest.fixture
def no_graphs(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def refuse(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    return lambda: monkeypatch.setattr(Runners, "_captured", refuse)


@pytest.mark.parametrize(
    ("drafter", "by"),
    [
        ("draft_model", "kernels"),
        ("draft_model", "torch"),
        ("eagle3", "kernels"),
        ("ngram", "kernels"),
        ("none", "kernels"),
    ],
)
def test_graphs_eager_steps_and_transformers_give_the_same(
    new_engine: NewEngine, no_graphs: Callable[[], None], drafter: str, by: str
) -> None:
    """Greedy and seeded, float32."""
    asked = traffic()[:8]  # each way to sample and to end
    captured = new_engine(by, drafter=drafter)
    found = serve(captured, *asked)
    assert (captured.backend, failed_capture(captured)) == ("cuda", None)
    theirs = serve(new_engine(by, drafter=drafter, model_path="generic"), *asked)
    no_graphs()
    eager = new_engine(by, drafter=drafter)
    step_by_step = serve(eager, *asked)
    assert "stream is capturing" in (failed_capture(eager) or "")
    for name, done in found.items():
        assert told(done) == told(step_by_step[name]), f"a graph's request {name} differs from eager steps'"
        assert told(done) == told(theirs[name]), f"request {name} differs from transformers'"


@pytest.mark.parametrize("rule", get_args(VerificationRule))
@pytest.mark.parametrize(
    ("drafter", "draft"),
    [("draft_model", "draft"), ("eagle3", "head"), ("suffix", None), ("hybrid", "draft"), ("hybrid", "head")],
)
def test_kernels_reference_and_transformers_give_the_same(
    new_engine: NewEngine,
    monkeypatch: pytest.MonkeyPatch,
    drafter: str,
    draft: str | None,
    rule: VerificationRule,
) -> None:
    """By each rule, also with drafters whose steps wait for the host."""
    asked, chosen = traffic()[:8], {"drafter": drafter, "draft": draft, "verification": rule}
    engine = new_engine(**chosen)
    assert engine.backend == DEVICE
    found = {name: told(done) for name, done in serve(engine, *asked).items()}
    plain = serve(new_engine(drafter="none"), *asked)
    for each in asked:
        if each.params.temperature == 0:
            assert found[each.request_id][0] == plain[each.request_id].output_token_ids
    theirs = serve(new_engine(**chosen, model_path="generic"), *asked)
    monkeypatch.setattr(placement, "backend_of", lambda _: Backend(None, "planted"))
    by_reference = serve(new_engine(**chosen), *asked)
    for name, ours in found.items():
        assert ours == told(theirs[name]), f"request {name} differs from transformers'"
        assert ours == told(by_reference[name]), f"request {name} differs from the reference's"


def test_a_step_that_cannot_be_captured_spoils_no_other(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Step.run

    def waits_in_a_batch_of_two(step: Step, queued: Tensor) -> Tensor:
        if queued.shape[1] == 2:
            queued.sum().item()
        return original(step, queued)

    asked = [request("a", range(3), 40), request("b", range(4), 40)]
    expected = serve(new_engine(drafter="none"), *asked)
    monkeypatch.setattr(Step, "run", waits_in_a_batch_of_two)
    engine = new_engine(drafter="none")
    assert "stream is capturing" in (failed_capture(engine) or "")
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert lost_device(torch.device(DEVICE)) is None
    found = serve(engine, *asked)
    assert {name: told(done) for name, done in found.items()} == {
        name: told(done) for name, done in expected.items()
    }
    eager = [shape.batch for shape, run in engine._decoder._plain.items() if run.__name__ == "eager"]
    assert set(eager) == {2}, "each other batch was captured, those behind the failed one too"


@pytest.mark.parametrize("drafter", ["draft_model", "eagle3", "ngram", "none"])
def test_no_step_waits_for_the_device(new_engine: NewEngine, drafter: str) -> None:
    engine = new_engine(drafter=drafter, num_speculative_tokens=3, dtype="bfloat16")
    for row in range(4):
        engine.submit(request(f"{row}", [5, 6, row], 150, temperature=1.0, seed=row))
    for _ in range(6):
        engine.step()
    received = 0
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(STEPS):
            for output in engine.step():
                assert output.finished is None, output.finished.error
                received += len(output.token_ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert received >= 4 * STEPS
    assert failed_capture(engine) is None


def test_a_draft_is_captured_between_the_steps_of_running_requests(new_engine: NewEngine) -> None:
    """By the thread that loads it, while another one runs steps."""
    asked = traffic()[:8]
    expected = {name: told(done) for name, done in serve(new_engine(), *asked).items()}
    engine = new_engine()
    prepare = engine._decoder.prepare
    busy: list[bool] = []

    def prepared(drafter: Drafter | None, shape: Shape) -> None:
        busy.append(engine.has_work())
        prepare(drafter, shape)

    engine._decoder.prepare = prepared  # type: ignore[method-assign]
    for each in asked:
        engine.submit(each)
    assert engine.draft.directory is not None
    with ThreadPoolExecutor(1) as pool:
        loading, outputs = pool.submit(engine.load_draft, engine.draft.directory, "v2"), engine.step()
        while engine.has_work() or not loading.done():
            outputs += engine.step()
        loading.result()
    assert any(busy), "every capture came after the last request"
    engine.swap_draft("v2")
    later = serve(engine, *asked)
    assert {done.draft.version for done in later.values() if done.counts.drafted} == {"v2"}
    assert {name: told(done) for name, done in finished(outputs).items()} == expected
    assert {name: told(done) for name, done in later.items()} == expected
    assert failed_capture(engine) is None


class _Decoded:
    """Three sequences in slots out of order, of which the first begins 5 tokens ahead and the last 11."""

    def __init__(self, module: Any, text: Tensor, slots: int) -> None:
        launcher = backend_of(text.device).launcher
        self._model = LlamaModel(module, slots, text.shape[1], 31, launcher)
        self._text = text
        assert launcher is None or self._model.kernels_obstacle is None

    def logits(self, width: int) -> Tensor:
        """[3, N, V], decoded `width` tokens of each at a time."""
        device, ahead = self._text.device, [5, 0, 11]
        slots = torch.tensor([2, 0, 3], device=device)
        parts: list[list[Tensor]] = [[], [], []]
        for row, count in enumerate(ahead):
            if count:
                start = torch.zeros(1, dtype=torch.int64, device=device)
                parts[row].append(
                    self._model.decode(self._text[row, None, :count], start, slots[row, None])[0]
                )
        while ahead[2] + width <= self._text.shape[1]:
            tokens = torch.stack([self._text[row, at : at + width] for row, at in enumerate(ahead)])
            logits = self._model.decode(tokens, torch.tensor(ahead, device=device), slots)
            for row, each in enumerate(logits):
                parts[row].append(each)
            ahead = [at + width for at in ahead]
        least = min(ahead)
        return torch.stack([torch.cat(part)[:least] for part in parts])


@pytest.mark.parametrize("width", [4, 9])  # of three rows: by kernels and by torch's products
@pytest.mark.parametrize("head_dim", [64, 128, 80])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_logits_in_bfloat16_are_those_of_transformers(kind: str, head_dim: int, width: int) -> None:
    """As near to exact logits as transformers' own in bfloat16, over a context of several splits."""
    shape = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "head_dim": head_dim}
    module = new_module(kind, seed=5, vocabulary=1000, max_position_embeddings=700, **shape)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter *= 0.25  # std 1/16: a layer keeps the size of what goes through it
    rounded = module.to(DEVICE, torch.bfloat16)
    text = torch.randint(0, 1000, (3, 600), generator=torch.Generator().manual_seed(7)).to(DEVICE)
    found = _Decoded(rounded, text, slots=5).logits(width).float()
    with torch.no_grad():
        theirs = rounded(text).logits.float()[:, : found.shape[1]]
        exact = rounded.float()(text).logits[:, : found.shape[1]]
    error, their_error = ((each - exact).norm() / exact.norm() for each in (found, theirs))
    assert their_error > 1e-3, "bfloat16 is told from float32"
    assert error < 1.5 * their_error, f"{error:.4f} beside transformers' {their_error:.4f}"


def test_after_a_failed_allocation_the_engine_serves_on(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine()
    asked = [request("a", range(3), 40), request("b", range(4), 40)]
    expected = serve(engine, *asked)
    original, steps = engine._decoder.step, 0

    def fails_once(*given: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:
            torch.empty(2**50, dtype=torch.uint8, device=DEVICE)
        return original(*given)

    monkeypatch.setattr(engine._decoder, "step", fails_once)
    broken = serve(engine, *asked)
    assert {done.finish_reason for done in broken.values()} == {"error"}
    assert all("OutOfMemoryError" in (done.error or "") for done in broken.values())
    assert engine.lost is None
    again = serve(engine, *asked)
    assert {name: told(done) for name, done in again.items()} == {
        name: told(done) for name, done in expected.items()
    }

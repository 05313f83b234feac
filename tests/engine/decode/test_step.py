"""A step on tensors that have a shape, a type and a device, but no values: whatever asks for one fails, and
what torch is asked to compute can be counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from driftguard_engine.decode.slots import SlotTable
from driftguard_engine.decode.step import Shape, Step
from driftguard_engine.drafters.base import Drafter
from driftguard_engine.drafters.draft_model import DraftModelDrafter
from driftguard_engine.drafters.heads import ChainDrafter, ParallelDrafter
from driftguard_engine.drafters.ngram import NgramDrafter
from driftguard_engine.kernels.cuda.launcher import Argument, Size
from driftguard_engine.models.chain_heads import Eagle3Model, FusedModel, ParallelModel
from driftguard_engine.models.linear import PlainLinear
from driftguard_engine.models.llama import LlamaModel
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.core.eagle3_heads import random_head
from tests.engine.core.heads import random
from tests.engine.core.tiny import new_module

VOCABULARY, SLOTS, LENGTH = 97, 3, 64
BATCH, DRAFTS = 4, 4
DEVICE = torch.device("meta")


class _Queued:
    """A `Launcher` that is asked for kernels, and runs none."""

    def __init__(self) -> None:
        self.kernels: list[str] = []

    def launch(self, kernel: str, grid: Size, block: int, arguments: Sequence[Argument]) -> None:
        assert all(each.device == DEVICE for each in arguments if isinstance(each, Tensor)), kernel
        self.kernels.append(kernel)


class _Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What torch computes outside the models' passes: all but views and memory that holds no values yet."""

    _FREE = frozenset({"empty", "select", "slice", "unsqueeze", "view"})

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[str] = []
        self._in_pass = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        if not self._in_pass and name not in self._FREE:
            self.operations.append(name)
        return func(*args, **(kwargs or {}))

    def a_pass(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def uncounted(*given: Any) -> Any:
            outer, self._in_pass = self._in_pass, True
            try:
                return function(*given)
            finally:
                self._in_pass = outer

        return uncounted


def step(drafter: str, queued: _Queued, draft_vocabulary: int = VOCABULARY) -> Step:
    with DEVICE:
        modules = [new_module("llama", seed=1, vocabulary=size) for size in (VOCABULARY, draft_vocabulary)]
        eagle3 = random_head(modules[0], VOCABULARY, (0, 1))
        mtp, peagle = (random(kind, modules[0], VOCABULARY) for kind in ("mtp", "peagle"))
        every = torch.arange(VOCABULARY)
    target, draft = (LlamaModel(module, SLOTS + 1, LENGTH, spare=31) for module in modules)
    ends, slots, room = (target.embedding, target.unembed), SLOTS + 1, LENGTH + 31
    drafters: dict[str, Drafter | None] = {
        "eagle3": ChainDrafter(Eagle3Model(eagle3, every, *ends, VOCABULARY, slots, room, queued)),
        "mtp": ChainDrafter(FusedModel(mtp, *ends, slots, room, queued)),
        "peagle": ParallelDrafter(ParallelModel(peagle, every, *ends, VOCABULARY, slots, room, queued)),
        "draft_model": DraftModelDrafter(draft),
        "ngram": NgramDrafter(2, 4),
        "none": None,
    }
    shape = Shape(BATCH, DRAFTS if drafters[drafter] else 0, narrows=True)
    return Step(target, SlotTable(SLOTS, LENGTH, {0}, DEVICE), drafters[drafter], shape, queued)


@pytest.mark.parametrize("drafter", ["draft_model", "eagle3", "mtp", "peagle", "ngram", "none"])
def test_a_step_on_a_gpu_asks_the_device_for_nothing(drafter: str) -> None:
    queued = _Queued()
    built = step(drafter, queued)
    told = built.run(torch.zeros(2, BATCH, dtype=torch.int64, device=DEVICE))
    drafts = 0 if drafter == "none" else DRAFTS
    assert (told.shape, told.device) == ((BATCH, 4 + drafts + 1), DEVICE)
    with pytest.raises(RuntimeError, match="meta"):  # the check can fail: this is how it would
        told.max().item()
    assert queued.kernels[-2:] == ["verify_chain_fp32", "append_step"]
    assert queued.kernels.count("draw_drafts_fp32") == (0 if drafter in ("ngram", "none") else DRAFTS)


@pytest.mark.parametrize(
    ("drafter", "draft_vocabulary"),
    [("none", VOCABULARY), ("ngram", VOCABULARY), ("draft_model", VOCABULARY), ("draft_model", 80)],
)
def test_a_step_asks_torch_for_little_but_the_models(
    monkeypatch: pytest.MonkeyPatch, drafter: str, draft_vocabulary: int
) -> None:
    """Each operation is a kernel of a graph that waits for the one before."""
    counted = _Counted()
    for of, name in ((LlamaModel, "_decoded"), (PlainLinear, "apply"), (PlainLinear, "apply_into")):
        monkeypatch.setattr(of, name, counted.a_pass(getattr(of, name)))
    built = step(drafter, _Queued(), draft_vocabulary)
    queued = torch.zeros(2, BATCH, dtype=torch.int64, device=DEVICE)
    with counted:
        built.run(queued)
    assert 0 < len(counted.operations) <= 8, counted.operations

"""A step on tensors that have a shape, a type and a device, but no values: whatever asks for one fails."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from driftguard_engine.decode.drafting import Drafting, LookupDrafting, ModelDrafting
from driftguard_engine.decode.slots import SlotTable
from driftguard_engine.decode.step import Step
from driftguard_engine.decode.verification import KernelVerification, Shape
from driftguard_engine.kernels.cuda.launcher import Argument, Size
from driftguard_engine.models.llama import LlamaModel
from torch import Tensor

from tests.engine.core.tiny import new_module

VOCABULARY, SLOTS, LENGTH = 97, 3, 64
SHAPE = Shape(batch=4, drafts=3, narrows=True)
DEVICE = torch.device("meta")


class _Queued:
    """A `Launcher` that is asked for kernels, and runs none."""

    def __init__(self) -> None:
        self.kernels: list[str] = []

    def launch(self, kernel: str, grid: Size, block: int, arguments: Sequence[Argument]) -> None:
        assert all(each.device == DEVICE for each in arguments if isinstance(each, Tensor)), kernel
        self.kernels.append(kernel)


def step(drafter: str, queued: _Queued) -> Step:
    with DEVICE:
        modules = [new_module("llama", seed=seed, vocabulary=VOCABULARY) for seed in (1, 2)]
    target, draft = (LlamaModel(module, SLOTS + 1, LENGTH, spare=31) for module in modules)
    drafting: dict[str, Drafting] = {
        "draft_model": ModelDrafting(draft, VOCABULARY),
        "ngram": LookupDrafting(2, 4, queued),
    }
    return Step(
        target,
        SlotTable(SLOTS, LENGTH, {0}, DEVICE),
        drafting[drafter],
        lambda: KernelVerification(queued, SHAPE, VOCABULARY, torch.float32, DEVICE),
    )


@pytest.mark.parametrize("drafter", ["draft_model", "ngram"])
def test_a_step_on_a_gpu_asks_the_device_for_nothing(drafter: str) -> None:
    queued = _Queued()
    built = step(drafter, queued)
    told = built.run(torch.zeros(2, SHAPE.batch, dtype=torch.int64, device=DEVICE))
    assert (told.shape, told.device) == ((SHAPE.batch, 4 + SHAPE.drafts + 1), DEVICE)
    with pytest.raises(RuntimeError, match="meta"):  # the check can fail: this is how it would
        told.max().item()
    assert queued.kernels[-1] == "verify_chain_fp32"
    assert queued.kernels.count("draw_drafts_fp32") == (SHAPE.drafts if drafter == "draft_model" else 0)

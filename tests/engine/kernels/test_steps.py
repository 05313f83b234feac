"""Whole steps by the kernels: what the reference gives."""

from __future__ import annotations

import pytest
import torch
from driftguard_engine.core import SamplingParams
from driftguard_engine.decode.slots import SlotTable
from driftguard_engine.decode.step import Shape, Step
from driftguard_engine.drafters.base import Drafter
from driftguard_engine.drafters.corpus import Corpus
from driftguard_engine.drafters.draft_model import DraftModelDrafter
from driftguard_engine.drafters.heads import BlockDrafter, ChainDrafter
from driftguard_engine.drafters.hybrid import HybridDrafter
from driftguard_engine.drafters.ngram import NgramDrafter
from driftguard_engine.drafters.other_vocabulary import SlemDrafter, TliDrafter
from driftguard_engine.drafters.suffix import Matches, SuffixDrafter
from driftguard_engine.kernels.cuda.launcher import Launcher
from driftguard_engine.models.base import TokenModel
from driftguard_engine.models.chain_heads import Eagle3Model, FusedModel
from driftguard_engine.models.dflash import BlockModel
from driftguard_engine.models.generic import GenericModel
from driftguard_engine.models.llama import LlamaModel
from driftguard_engine.models.token_texts import TokenTexts

from tests.engine.core.eagle3_heads import random_head
from tests.engine.core.heads import random
from tests.engine.core.tiny import new_module
from tests.engine.kernels.emulated import Emulated
from tests.engine.simt.emulator import Module

VOCABULARY, LENGTH, STEPS = 97, 64, 5
CPU = torch.device("cpu")
SHAPE = Shape(batch=4, drafts=3, narrows=True)
KNOWN = [(7, 6, 30, 31)]  # behind the prompt of the first row, which is guessed while others are drawn
LETTERS = TokenTexts(  # of all tokens but three
    lambda text, **_: {"input_ids": [ord(letter) - ord("!") for letter in text]},
    {token: bytes([ord("!") + token]) for token in range(94)},
    {},
    (),
)
ROWS = [  # of slots 2, 0, 1; the fourth row of the batch is nobody's
    SamplingParams(max_tokens=20, temperature=1.0, seed=11),
    SamplingParams(max_tokens=20, temperature=0.0, seed=12, ignore_eos=True),
    SamplingParams(max_tokens=6, temperature=1.2, top_k=9, top_p=0.9, seed=13),
]


def sequences(drafter: str, launcher: Launcher | None, path: str) -> list[list[int]]:
    """What STEPS steps tell of their rows, and the tokens of every slot behind them."""
    module, disturbed = (new_module("llama", seed=1, vocabulary=VOCABULARY, head_dim=16) for _ in range(2))
    with torch.no_grad():
        for parameter in disturbed.parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    target: TokenModel = LlamaModel(module, 4, LENGTH, spare=3, launcher=launcher)
    draft: TokenModel = LlamaModel(disturbed, 4, LENGTH, launcher=launcher)
    if path == "generic":
        target, draft = (GenericModel(each, 4, LENGTH) for each in (module, disturbed))
    embedding = module.model.embed_tokens.weight.detach()
    every = torch.arange(VOCABULARY)
    ends = embedding, target.unembed
    head = Eagle3Model(random_head(module, VOCABULARY, (0, 1)), every, *ends, VOCABULARY, 4, LENGTH, launcher)
    fused = FusedModel(random("mtp", module, VOCABULARY), *ends, 4, LENGTH, launcher)
    block = BlockModel(random("dspark", module, VOCABULARY), every, embedding, VOCABULARY, 4, LENGTH)
    long_matches = SuffixDrafter(Corpus(KNOWN), matches=Matches(least=2))
    drafters: dict[str, Drafter] = {
        "draft_model": DraftModelDrafter(draft),
        "eagle3": ChainDrafter(head),
        "mtp": ChainDrafter(fused),
        "dspark": BlockDrafter(block),
        "ngram": NgramDrafter(1, 3),
        "tli": TliDrafter(draft, VOCABULARY, LETTERS, LETTERS),
        "slem": SlemDrafter(draft, VOCABULARY, LETTERS, LETTERS),
        "hybrid": HybridDrafter(long_matches, DraftModelDrafter(draft)),
        "hybrid_with_head": HybridDrafter(long_matches, ChainDrafter(head)),
    }
    table = SlotTable(3, LENGTH, {0}, CPU)
    step = Step(target, table, drafters[drafter], SHAPE, launcher)
    slots = [2, 0, 1]
    for slot, params in zip(slots, ROWS, strict=True):
        table.admit(slot, [5 + slot, 6], 2 + params.max_tokens, params)
    queued = torch.tensor([[*slots, table.spare], [3, 2, 3, 0]])
    told = [row for _ in range(STEPS) for row in step.run(queued)[:, :4].tolist()]
    return [*told, *table.state.token_ids[:3].tolist()]


@pytest.mark.parametrize("path", ["lean", "generic"])
@pytest.mark.parametrize(
    "drafter",
    ["draft_model", "eagle3", "mtp", "dspark", "ngram", "hybrid", "hybrid_with_head", "tli", "slem"],
)
def test_steps_by_kernels_are_those_of_the_reference(module: Module, drafter: str, path: str) -> None:
    assert sequences(drafter, Emulated(module, seed=3), path) == sequences(drafter, None, path)

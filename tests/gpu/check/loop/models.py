"""The synthetic target and its drafts, each made once, and engines that serve them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from driftguard_engine.config import EngineConfig
from driftguard_engine.core import DraftInfo
from driftguard_engine.decode.placement import placement_of
from driftguard_engine.drafters.draft_model import DraftModelDrafter
from driftguard_engine.drafters.loaded import LoadedDraft
from driftguard_engine.engine import Engine
from driftguard_engine.models.llama import LlamaModel
from driftguard_engine.models.loading import LoadedModel
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tests.gpu.check.loop.synthetic import (
    Bigrams,
    Pair,
    Shape,
    find_disturbance,
    new_module,
    weight_bytes_per_step,
)

SEED = 71
NAME = "synthetic"
ROOM = 64  # positions behind max_length that drafts stay within


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured with: prompt_tokens of each request, max_length of each with its output."""

    pair: Pair
    device: torch.device
    dtype: torch.dtype
    max_batch: int
    max_length: int
    prompt_tokens: int


class Models:
    """Made when first asked for, and kept."""

    def __init__(self, setting: Setting, say: Callable[[str], None]) -> None:
        self.setting, self._say = setting, say
        self._draft_modules: dict[float, Any] = {}
        self._lean_drafts: dict[float, LlamaModel] = {}

    @cached_property
    def bigrams(self) -> Bigrams:
        setting = self.setting
        vocabulary, rank = setting.pair.target.vocabulary, setting.pair.draft.hidden
        return Bigrams.draw(vocabulary, rank, setting.dtype, setting.device, SEED)

    @cached_property
    def contexts(self) -> Tensor:
        return self.bigrams.contexts()

    @cached_property
    def target_module(self) -> Any:
        made = self._module(self.setting.pair.target, self.bigrams.successors)
        entropy = self.bigrams.entropy_nats(self.contexts)
        self._say(
            f"target: {weight_bytes_per_step(made) / 1e9:.2f} GB a step, distributions of {entropy:.2f} nats"
        )
        return made

    def draft_module(self, acceptance: float) -> Any:
        if acceptance not in self._draft_modules:
            found = find_disturbance(acceptance, lambda tried: self.bigrams.overlap(self.contexts, tried))
            made = self._module(self.setting.pair.draft, self.bigrams.disturbed(found))
            self._draft_modules[acceptance] = made
            size = weight_bytes_per_step(made) / 1e9
            self._say(f"draft of acceptance {acceptance:g}: {size:.2f} GB a step, disturbed by {found:.3f}")
        return self._draft_modules[acceptance]

    def engine(self, acceptance: float, max_batch: int, **settings: Any) -> Engine:
        """With the draft of this acceptance in service. The models' caches are those of all engines."""
        config = self._config(max_batch, **settings)
        return Engine(config, self._loaded_target, self._loaded_draft(acceptance))

    def _config(self, max_batch: int, num_speculative_tokens: int = 1, **settings: Any) -> EngineConfig:
        return EngineConfig(
            target=NAME,
            draft=NAME,
            device="cuda" if self.setting.device.type == "cuda" else "cpu",
            dtype=str(self.setting.dtype).removeprefix("torch."),
            max_batch=max_batch,
            max_length=self.setting.max_length,
            num_speculative_tokens=num_speculative_tokens,
            **{
                "max_speculative_tokens": num_speculative_tokens,
                "prefill_chunk_tokens": self.setting.max_batch * self.setting.prompt_tokens,
            }
            | settings,
        )

    @cached_property
    def _loaded_target(self) -> LoadedModel:
        tokenizer = _tokenizer(self.setting.pair.target.vocabulary)
        return LoadedModel(NAME, Path(NAME), self._lean(self.target_module), tokenizer, frozenset())

    def _loaded_draft(self, acceptance: float) -> LoadedDraft:
        if acceptance not in self._lean_drafts:
            self._lean_drafts[acceptance] = self._lean(self.draft_module(acceptance))
        info = DraftInfo(NAME, f"acceptance-{acceptance:g}", "draft_model")
        model = self._lean_drafts[acceptance]
        return LoadedDraft(info, DraftModelDrafter(model))

    def _lean(self, module: Any) -> LlamaModel:
        placement = placement_of(self._config(self.setting.max_batch))
        return LlamaModel(module, placement.slots, placement.max_length, placement.spare, placement.launcher)

    def _module(self, shape: Shape, successors: Tensor) -> Any:
        positions = self.setting.max_length + ROOM
        return new_module(
            shape, self.bigrams.signs, successors, positions, self.setting.dtype, self.setting.device
        )


def _tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    words = {f"w{index}": index for index in range(vocabulary)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]

"""Whether models fit into a GPU's memory, computed before their weights are loaded.

The cache of each holds max_length tokens for max_batch requests from the start. On the CPU nothing is
refused: there a cache takes memory page by page, as tokens are written to it.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, PretrainedConfig

from driftguard_engine.config import EngineConfig
from driftguard_engine.core import InvalidModel
from driftguard_engine.kernels.layer_launches import AttentionScratch
from driftguard_engine.kv_cache import SlotCache
from driftguard_engine.models import directory as directories
from driftguard_engine.models import llama_weights
from driftguard_engine.models.fused_head import SHARED
from driftguard_engine.models.llama_weights import Heads
from driftguard_engine.models.loading import Placement, longest
from driftguard_engine.models.medusa_head import is_medusa, sizes_of
from driftguard_engine.models.recurrent import STATES, bytes_kept
from driftguard_engine.models.speculators import NOT_READ, HeadDirectory, head_kind
from driftguard_engine.models.streaming_adapter import hidden_of, is_streaming
from driftguard_engine.models.target_mtp import names_of

# For what is not computed: CUDA graphs, the workspaces of libraries, a layer's weights while they are packed,
# reading of prompts.
RESERVE_BYTES = 1 << 30
_META = torch.device("meta")
_CAST = ("F64", "F32", "F16", "BF16")  # to the type that serves; others (quantised) stay as they are


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """What the model of one field (target, draft, or mtp: the target's own layer) takes, in bytes."""

    field: str
    weights: int
    layers: int
    heads: Heads
    config: Any  # of transformers
    head: bool = False  # whose slots are as long as the target's, however long it is trained for
    kept: int = 0  # numbers of each position that it keeps beside keys and values, or without them
    block: int = 0  # positions behind them that it drafts at
    recurrent: tuple[int, int] | None = None  # see `bytes_kept`

    @classmethod
    def read(cls, field: str, name: str, dtype: torch.dtype) -> ModelMemory:
        """From the config and the headers of the weights. Raises InvalidModel: these cannot be read."""
        directory, weights = directories.find(name, field=field), 0
        try:
            medusa, streaming, kind = is_medusa(directory), is_streaming(directory), head_kind(directory)
            of_places, unread = medusa or streaming, _unread(kind)
            of_any_name = of_places or kind is not None
            config: Any = None
            if not of_any_name:
                config = AutoConfig.from_pretrained(str(directory), trust_remote_code=False)
            own = None if config is None else names_of(config.get_text_config())
            for path in (directories.weight_files if of_any_name else directories.loaded_files)(directory):
                with safe_open(path, "pt") as file:
                    names = set(file.keys()) - unread
                    if own is not None:
                        prefix, copies = own
                        names = {
                            each for each in names - copies if each.startswith(prefix) == (field == "mtp")
                        }
                    for tensor in map(file.get_slice, names):
                        weights += math.prod(tensor.get_shape()) * _item_bytes(tensor.get_dtype(), dtype)
            if of_places:
                kept, vocabulary = sizes_of(directory) if medusa else (hidden_of(directory), 0)
                sizes: Any = PretrainedConfig()
                sizes.vocab_size = vocabulary
                return cls(field, weights, 0, Heads(1, 1, 1), sizes, True, kept)
            if kind is not None:
                return cls._of_head(HeadDirectory(directory, field), kind, weights)
            text = config.get_text_config()
            if field == "mtp":
                return cls(field, weights, 1, _heads_of(text), config, True, text.hidden_size)
            kept_bytes = bytes_kept(config, dtype)
            heads = _heads_of(text) if hasattr(text, "num_attention_heads") else Heads(1, 1, 1)
            return cls(field, weights, text.num_hidden_layers, heads, config, recurrent=kept_bytes)
        except Exception as error:  # of json, safetensors and transformers, for files of any content
            raise InvalidModel(
                f"{field}: how much memory {directory} needs cannot be told ({error})", field=field
            ) from error

    @classmethod
    def _of_head(cls, source: HeadDirectory, kind: str, weights: int) -> ModelMemory:
        config = source.layer_config()
        layers, kept, block = config.num_hidden_layers, config.hidden_size, 0
        if kind in ("mtp", "eagle"):
            layers = 1
        if kind in ("dflash", "dspark"):
            kept, block = 0, source.whole("block_size", 1, config.max_position_embeddings)
        return cls(source.field, weights, layers, _heads_of(config), config, True, kept, block)

    def cache(self, placement: Placement) -> int:
        if self.recurrent is not None:
            position, state = self.recurrent
            return placement.slots * (self._room(placement) * position + len(STATES) * state)
        layer = SlotCache(placement.slots, self._room(placement), _META, placement.dtype)
        text = self.config.get_text_config()
        if latent := getattr(text, "kv_lora_rank", None):  # of DeepSeek's attention, which keeps it alone
            layer.add_layer(1, latent, text.qk_rope_head_dim)
        else:
            layer.add_layer(self.heads.keys, self.heads.dim, self.heads.dim)
        layer.add_layer(1, self.kept, 0)
        return self.layers * (layer.keys[0].nbytes + layer.values[0].nbytes) + layer.keys[1].nbytes

    def step(self, placement: Placement, drafts: int) -> int:
        """Of a step with this many drafts in every slot: logits, and the scratch of attention."""
        # Of a slot: tokens that are read at a time, and rows of logits.
        read, rows = (drafts + 1, drafts + 1) if self.field == "target" else (2, drafts)
        vocabulary: int = self.config.get_text_config().vocab_size
        logits = placement.slots * rows * vocabulary * placement.dtype.itemsize
        if placement.launcher is None:
            return logits
        scratch = AttentionScratch.empty(
            placement.slots * read, self.heads.queries, self.heads.dim, self._room(placement), _META
        )
        return logits + scratch.values.nbytes + scratch.maxima.nbytes + scratch.sums.nbytes

    def _room(self, placement: Placement) -> int:
        """Positions of a slot."""
        if self.head:
            return placement.max_length + placement.spare + self.block
        length = longest(self.config, placement)
        lean = placement.lean and llama_weights.supports(self.config, length)
        return length + placement.spare * lean


def check_fits(
    config: EngineConfig,
    placement: Placement,
    free: int | None,
    wanted: Sequence[tuple[str, str]],
    held: Sequence[tuple[str, str]] = (),
) -> None:
    """free: see `free_bytes`. wanted: the models to load, held: those in memory already; each as field and
    directory or hub name.

    Raises InvalidModel: there is too little memory, with the numbers and the largest settings that fit.
    """
    if free is None:
        return
    new = [ModelMemory.read(field, name, placement.dtype) for field, name in wanted]
    drafts = config.max_speculative_tokens

    def total(models: Sequence[ModelMemory], max_batch: int, max_length: int) -> int:
        slots = placement.slots - config.max_batch + max_batch
        by = replace(placement, slots=slots, max_length=max_length)
        return sum(each.weights + each.cache(by) + each.step(by, drafts) for each in models)

    needed = total(new, config.max_batch, config.max_length) + RESERVE_BYTES
    if needed <= free:
        return
    present = []
    for field, name in held:
        with suppress(InvalidModel):  # its directory was removed since; then a little more would fit
            present.append(ModelMemory.read(field, name, placement.dtype))
    room = free - RESERVE_BYTES + total(present, config.max_batch, config.max_length)

    def fits(max_batch: int, max_length: int) -> bool:
        return total([*new, *present], max_batch, max_length) <= room

    batch = _most(config.max_batch, lambda size: fits(size, config.max_length))
    length = _most(config.max_length, lambda size: fits(config.max_batch, size))
    largest = [f"max_batch {batch}"] * (batch > 0) + [f"max_length {length}"] * (length > 1)
    parts = [
        f"{each.field}: weights {_gib(each.weights)}, cache {_gib(each.cache(placement))}, "
        f"steps {_gib(each.step(placement, drafts))}"
        for each in new
    ]
    field = wanted[0][0]
    raise InvalidModel(
        f"{field}: max_batch {config.max_batch} and max_length {config.max_length} need {_gib(needed)} on "
        f"the device, of which {_gib(free)} are free ({'; '.join(parts)}; reserve {_gib(RESERVE_BYTES)}); "
        f"{' or '.join(largest) or 'no other max_batch or max_length'} would fit",
        field=field,
    )


def free_bytes(device: torch.device) -> int | None:
    """What can still be allocated on a CUDA device; None on the CPU. Must not run beside a step."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()  # else what torch keeps of models that were freed would not count
    return torch.cuda.mem_get_info(device)[0]


def _unread(kind: str | None) -> set[str]:
    """Tensors in the files of a head of this kind that are not loaded."""
    return {*NOT_READ, *(SHARED if kind in ("mtp", "eagle") else ())} if kind is not None else set()


def _heads_of(config: Any) -> Heads:
    """Also where every query head has keys of its own, or all share one."""
    queries: int = config.num_attention_heads
    dim: int = getattr(config, "head_dim", None) or config.hidden_size // queries
    keys = 1 if getattr(config, "multi_query", False) else getattr(config, "num_key_value_heads", None)
    return Heads(queries, keys or queries, dim)


def _item_bytes(kind: str, served: torch.dtype) -> int:
    """kind: as safetensors names it, for example F32, F8_E4M3, BOOL."""
    if kind in _CAST:
        return served.itemsize
    bits = re.search(r"\d+", kind)
    return int(bits[0]) // 8 if bits else 1


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest size from 1 up to the limit that fits; 0: none."""
    return bisect_left(range(1, limit + 1), True, key=lambda size: not fits(size))


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"

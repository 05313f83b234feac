"""The generic path: any causal language model, through transformers' own forward.

Sequences run one at a time, each as a batch of one, so that their bits depend on their own tokens and
lengths alone; `SlotLayer` hands attention fresh copies of the sequence's keys and values, because memory
alignment can change bits too. Correctness before speed: the lean path is several times faster.

Recurrent layers go on from states of `SlotStates`, and read accepted tokens again behind rejected ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from driftguard_engine.kv_cache import SlotCache, Span
from driftguard_engine.models.base import DecodesBySpans, Features
from driftguard_engine.models.linear import Linear, choose
from driftguard_engine.models.recurrent import (
    SlotStates,
    cache_argument,
    has_keys,
    is_recurrent,
    layers_of,
)

RECURRENT = "keeps a recurrent state, which cannot take back rejected tokens"
# Tokens that recurrent layers read again in one pass with new ones. A pass of their own costs all weights
# once more, but moves the state behind them, so that no later step reads them again.
READ_AGAIN = 8


class SlotLayer(CacheLayerMixin):
    """One layer of a slot cache as transformers sees it, for the span set by `point_at`.

    Every layer keeps all positions, also of a model with sliding-window attention: the mask hides old ones.
    """

    is_sliding = False

    def __init__(self, cache: SlotCache, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache
        self._index = index
        self._span = Span(0, 0, 0)

    def point_at(self, span: Span) -> None:
        self._span = span

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._cache.add_layer(key_states.shape[1], key_states.shape[3], value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """[1, heads, T, dim] of the span's tokens in; [1, heads, end, dim] of the sequence so far out."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self._cache.read(self._index, self._span)
        keys[self._span.start :].copy_(key_states[0].transpose(0, 1))
        values[self._span.start :].copy_(value_states[0].transpose(0, 1))
        return _fresh(keys), _fresh(values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._span.start + query_length, 0

    def get_seq_length(self) -> int:
        return self._span.start

    def get_max_length(self) -> int:
        return self._cache.length


class HybridSlotLayer(LinearAttentionLayer, SlotLayer):  # type: ignore[override]
    """A layer of attention and a recurrence side by side."""

    def __init__(self, cache: SlotCache, index: int, number_of_states: int) -> None:
        SlotLayer.__init__(self, cache, index)
        LinearAttentionLayer.__init__(self, number_of_states)  # type: ignore[no-untyped-call]

    def lazy_initialization(  # type: ignore[override]
        self, *keys_and_values: Tensor, **states: Any
    ) -> None:
        if keys_and_values:
            SlotLayer.lazy_initialization(self, *keys_and_values)
        else:
            LinearAttentionLayer.lazy_initialization(self, **states)


def _fresh(stored: Tensor) -> Tensor:
    return stored.transpose(0, 1).clone(memory_format=torch.contiguous_format)[None]


class GenericModel(DecodesBySpans):
    """Any transformers causal language model with a slot cache. See `TokenModel`."""

    path: Literal["lean", "generic"] = "generic"
    kernels_obstacle: str | None = (
        "transformers computes it (the generic path), and each step waits for the host"
    )

    def __init__(self, module: Any, slots: int, max_length: int) -> None:
        """Raises ValueError: the module does not go on from what the cache holds of a sequence."""
        kinds = layers_of(module.config)
        self.recurrent = any(map(is_recurrent, kinds))
        if module._is_stateful and not self.recurrent:
            raise ValueError("keeps a recurrent state that is not in transformers' own cache")
        _rotate_by_one_set(module, max_length)
        self._module = module
        self.vocabulary: int = module.get_output_embeddings().weight.shape[0]
        self.max_length = max_length
        self._device = module.device
        self._rounding = torch.finfo(module.dtype).eps ** 0.5  # some give logits in float32 all the same
        self._store = SlotCache(slots, max_length, module.device, module.dtype)
        self.layers: int = module.config.get_text_config().num_hidden_layers
        self.hidden: int = module.config.get_text_config().hidden_size
        self.embedding: Tensor = module.get_input_embeddings().weight.detach()
        layers = self._layers_like(kinds)
        self._cache = Cache(layers=layers)
        self._attention = [each for each in layers if isinstance(each, SlotLayer)]
        self._states: SlotStates | None = None
        self._argument = {cache_argument(module): self._cache}
        try:
            # One token now allocates all memory at the start, and not under traffic.
            self.dtype = self.forward([0], [Span(0, 0, 1)]).dtype
            if self.recurrent:
                self._states = SlotStates([each for each in layers if is_recurrent(each)], slots)
            obstacle = self._obstacle()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of code that is not ours
            raise ValueError(
                f"cannot be computed from a cache of slots ({type(error).__name__}: {error})"
            ) from error
        if obstacle is not None:
            raise ValueError(obstacle)
        self.tree_obstacle = self._tree_obstacle()

    def _layers_like(self, kinds: Sequence[Any]) -> list[Any]:
        layers: list[Any] = []
        for kind in kinds:
            index = sum(isinstance(each, SlotLayer) for each in layers)
            if not is_recurrent(kind):
                layers.append(SlotLayer(self._store, index) if has_keys(kind) else kind)
            elif has_keys(kind):
                layers.append(HybridSlotLayer(self._store, index, kind.number_of_states))
            else:
                layers.append(kind)
        return layers

    def _obstacle(self) -> str | None:
        """By what it makes of a few tokens: some models have no use for a cache, or keep more elsewhere."""

        def read(token_ids: Sequence[int], start: int = 0) -> Tensor:
            return self.forward(token_ids, [Span(0, start, len(token_ids))])

        def apart(one: Tensor, other: Tensor) -> bool:
            return not bool((one - other).abs().max() < self._rounding * one.abs().max())

        if apart(read([0, 2])[0], read([0, 3])[0]):
            return "lets a token see those behind it"
        read([1])
        behind_another = read([2, 3], 1)
        read([0])
        behind = read([2, 3], 1)
        if torch.equal(behind, behind_another):
            return "does not see what its cache holds of the tokens before"
        if self._states is not None:
            one_by_one = torch.cat([read([token], place) for place, token in enumerate([0, 2, 3])])
            if apart(whole := read([0, 2, 3]), one_by_one) or apart(whole[1:], behind):
                return "goes on from its recurrent state to other logits than those of the whole text"
            read([0])
        read([1, 1], 1)  # rejected
        if apart(behind, read([2, 3], 1)):
            return RECURRENT
        return None

    def _tree_obstacle(self) -> str | None:
        """By what it makes of a small tree: models take masks and positions in different ways."""
        config, name = self._module.config.get_text_config(), type(self._module).__name__
        if self._states is not None:
            return f"{name} keeps a recurrent state, which reads all tokens as one chain"
        kinds = [getattr(config, field, None) or () for field in ("layer_types", "attention_layers")]
        limited = set(chain(*kinds)) - {"full_attention", "global"}
        if limited or getattr(config, "sliding_window", None):
            return f"{name} limits how far its layers see, which the mask of a tree does not hold"
        try:
            alone = self.forward([0, 2, 3], [Span(0, 0, 3)])
            tree = self.forward([0, 1, 2, 3], [Span(0, 0, 4, (-1, 0, 0, 2))])
        except Exception as error:  # noqa: BLE001 of code that is not ours
            return f"{name} takes no mask of four dimensions ({type(error).__name__}: {error})"
        apart = (tree[[0, 2, 3]] - alone).abs().max() / alone.abs().max()
        if not apart < self._rounding:
            return f"{name} does not place tokens by position ids alone, or see them by a mask alone"
        return None

    @torch.inference_mode()
    def forward(
        self, token_ids: Sequence[int], spans: Sequence[Span], features: Features | None = None
    ) -> Tensor:
        return torch.cat([self._run(ids, span, features) for ids, span in _split(token_ids, spans)])  # [N, V]

    @torch.inference_mode()
    def prefill(
        self, token_ids: Sequence[int], spans: Sequence[Span], features: Features | None = None
    ) -> None:
        if self._states is not None:
            for span in spans:
                self._states.settle(span.slot, span.start)
        for ids, span in _split(token_ids, spans):
            self._run(ids, span, features, logits_to_keep=1)

    @cached_property
    def _head(self) -> Linear:
        output = self._module.get_output_embeddings()
        return choose(output.weight, getattr(output, "bias", None))

    @torch.inference_mode()
    def unembed(self, hidden: Tensor) -> Tensor:
        return self._head.apply(hidden)

    def keep(self, slots: Sequence[int], starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        self._store.keep(slots, starts, paths)

    def copy(self, source: int, span: Span) -> None:
        self._store.copy(source, span)
        if self._states is not None and span.start < self.max_length:  # a draft's may be shorter than prompts
            self._states.copy(source, span.slot, span.start, min(span.end, self.max_length))

    def share(self, slot: int) -> None:
        if self._states is not None:
            self._states.share(slot)

    def _settle(self, slots: Tensor, starts: Tensor) -> None:
        if self._states is not None:
            for slot, start in zip(slots.tolist(), starts.tolist(), strict=True):
                self._states.settle(slot, start)

    def _run(
        self, token_ids: Sequence[int], span: Span, features: Features | None = None, **options: Any
    ) -> Tensor:
        if self._states is None:
            return self._pass(token_ids, span, features, options)
        again = self._go_back(self._states, span)
        whole = Span(span.slot, span.start - len(again), span.count + len(again))
        return self._pass([*again, *token_ids], whole, features, options, new=span.count)

    def _go_back(self, states: SlotStates, span: Span) -> list[int]:
        """The tokens before the span's first that recurrent layers have to read again with it."""
        first = states.cut(span.slot, span.start)
        again = states.behind(span.slot, first)
        if len(again) <= READ_AGAIN:
            return again
        self._pass(again, Span(span.slot, first, len(again)), None, {"logits_to_keep": 1})
        states.settle(span.slot, span.start)
        return []

    def _pass(
        self,
        token_ids: Sequence[int],
        span: Span,
        features: Features | None,
        options: dict[str, Any],
        new: int | None = None,
    ) -> Tensor:
        """Logits [T, V]. new: only the last tokens are asked for; None: all."""
        for layer in self._attention:
            layer.point_at(span)
        if self._states is not None:
            self._states.load(span.slot)
        positions = torch.tensor(span.positions, device=self._device)
        if span.parents is not None:
            options["attention_mask"] = self._mask(span)
        output = self._module(
            input_ids=torch.tensor([list(token_ids)], device=self._device),
            position_ids=positions[None],
            use_cache=True,
            output_hidden_states=features is not None,
            **self._argument,
            **options,
        )
        if self._states is not None:
            self._states.save(span.slot, span.start, token_ids)
        asked = slice(-span.count if new is None else -new, None)
        if features is not None:
            for index, hidden in enumerate(output.hidden_states):
                features.take(index, hidden[0, asked])
        logits: Tensor = output.logits[0, asked]
        return logits

    def _mask(self, span: Span) -> Tensor:
        """Additive [1, 1, T, end], for a tree."""
        lowest = torch.finfo(self._module.dtype).min
        mask = torch.full((span.count, span.end), lowest, dtype=self._module.dtype, device=self._device)
        mask[:, : span.start] = 0
        mask[:, span.start :][span.seen().to(self._device)] = 0
        return mask[None, None]


def _rotate_by_one_set(module: Any, max_length: int) -> None:
    """LongRoPE takes its long factors in each pass that sees a position beyond the original context, and else
    its short ones. Keys of the other kind would stay in the cache, so that the length decides here for all
    passes: each rotates a last position of the context too."""
    for part in module.modules():
        if getattr(part, "rope_type", None) == "longrope":
            part.forward = partial(_rotated_with, part.forward, max_length - 1)


def _rotated_with(forward: Callable[..., Any], last: int, states: Tensor, position_ids: Tensor) -> Any:
    cos, sin = forward(states, torch.nn.functional.pad(position_ids, (0, 1), value=last))
    return cos[:, :-1], sin[:, :-1]


def _split(token_ids: Sequence[int], spans: Sequence[Span]) -> list[tuple[Sequence[int], Span]]:
    first, parts = 0, []
    for span in spans:
        parts.append((token_ids[first : first + span.count], span))
        first += span.count
    return parts

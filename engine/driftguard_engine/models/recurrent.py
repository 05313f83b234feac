"""What recurrent layers (gated delta net, Mamba, short convolutions) keep of each slot's sequence.

Keys and values can be cut behind any token; a recurrent state is one of all tokens read so far. To go back
behind rejected tokens, a state from before them is put back, and the accepted ones behind it are read again.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, LinearAttentionLayer

# States of a slot: behind all that was read; behind tokens that are not taken back; and behind whole chunks
# of a prompt, for others that begin alike.
STATES = LIVE, SETTLED, SHARED = range(3)
# By name, because not every release of transformers has all of them.
_KNOWN = {
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "DummyLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
}


def layers_of(config: Any) -> list[Any]:
    """The layers of the cache that transformers makes for this configuration.

    Raises ValueError: some are of a form that is not read here.
    """
    try:
        layers = DynamicCache(config=config).layers
    except (KeyError, AttributeError) as error:
        raise ValueError(f"has layers that transformers' own cache does not know ({error})") from error
    if unknown := sorted({type(each).__name__ for each in layers} - _KNOWN):
        raise ValueError(f"keeps {unknown[0]} in its cache, which is not read")
    return list(layers)


def is_recurrent(layer: Any) -> bool:
    return isinstance(layer, LinearAttentionLayer)


def has_keys(layer: Any) -> bool:
    """Whether it keeps keys and values, perhaps beside a state."""
    return isinstance(layer, DynamicLayer)


def bytes_kept(config: Any, dtype: torch.dtype) -> tuple[int, int] | None:
    """Bytes that a recurrent model of this configuration keeps of each position, and in each state, where it
    serves in `dtype`, by a pass that computes nothing; None: it is not recurrent. Raises ValueError as
    `layers_of`."""
    layers = layers_of(config)
    recurrent = [each for each in layers if is_recurrent(each)]
    if not recurrent:
        return None
    with torch.device("meta"), torch.inference_mode():
        # In bfloat16, which experts are computed in without a look at the values of their router.
        module: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.bfloat16
        )
        cache = {cache_argument(module): Cache(layers=layers)}
        module(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=True, **cache)
    keys = [each for layer in layers if has_keys(layer) for each in (layer.keys, layer.values)]
    states = [state for state, *_ in _states_in(recurrent)]

    def size(tensors: Sequence[Tensor]) -> int:
        types = [dtype if each.dtype is torch.bfloat16 else each.dtype for each in tensors]
        return sum(each.numel() * kind.itemsize for each, kind in zip(tensors, types, strict=True))

    return size(keys), size(states)


def cache_argument(module: Any) -> str:
    """How its forward names the cache: transformers 5.24 has renamed it."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


def _states_in(layers: Sequence[LinearAttentionLayer]) -> list[tuple[Tensor, dict[int, Tensor], int]]:
    """Each state of layers of a cache, [1, ...], and where it is."""
    found: list[tuple[Tensor, dict[int, Tensor], int]] = []
    for layer in layers:
        both: Any = layer.conv_states, layer.recurrent_states
        for states in both:
            found += [(each, states, at) for at, each in states.items() if each is not None]
    return found


class SlotStates:
    """Of each slot, the tokens read so far, and states behind some of them: always of these very tokens."""

    def __init__(self, layers: Sequence[LinearAttentionLayer], slots: int) -> None:
        """layers: of a cache, which have read one token; what they hold is that of the pass at hand."""
        self._layers = layers
        self._stored = [
            each.new_zeros(slots, len(STATES), *each.shape[1:]) for each, *_ in _states_in(layers)
        ]
        self._tokens: list[list[int]] = [[] for _ in range(slots)]
        self._behind = [[0] * len(STATES) for _ in range(slots)]  # so many tokens; 0: it holds nothing
        self._places = [[*STATES] for _ in range(slots)]  # in _stored, by state

    def cut(self, slot: int, start: int) -> int:
        """Takes back what was read from position `start` on. Returns behind how many tokens the last state
        is that remains. Raises ValueError: the slot holds fewer tokens."""
        tokens = self._tokens[slot]
        if start > len(tokens):
            raise ValueError(f"slot {slot} holds {len(tokens)} tokens, and not {start}")
        del tokens[start:]
        behind = [count if count <= start else 0 for count in self._behind[slot]]
        self._behind[slot] = behind
        return max(behind)

    def behind(self, slot: int, first: int) -> list[int]:
        """The tokens from position `first` on."""
        return self._tokens[slot][first:]

    def settle(self, slot: int, start: int) -> None:
        """What is before position `start` is not taken back."""
        if self._behind[slot][LIVE] == start:
            for each in (self._behind[slot], self._places[slot]):
                each[LIVE], each[SETTLED] = each[SETTLED], each[LIVE]

    def share(self, slot: int) -> None:
        """Keeps the state behind all that was read for `copy`, until the next one is."""
        if self._behind[slot][LIVE]:
            self._behind[slot][SHARED] = self._behind[slot][LIVE]
            live, shared = self._places[slot][LIVE], self._places[slot][SHARED]
            for stored in self._stored:
                stored[slot, shared].copy_(stored[slot, live])

    def copy(self, source: int, slot: int, start: int, end: int) -> None:
        """The slot's tokens from position start to end become those of `source`, with its last state behind
        any of them."""
        own = self.cut(slot, start)
        self._tokens[slot] += self._tokens[source][start:end]
        counts = [(count, state) for state, count in enumerate(self._behind[source]) if count <= end]
        behind, state = max(counts, default=(0, LIVE))
        if behind > own:
            self._behind[slot][SHARED] = behind
            read, written = self._places[source][state], self._places[slot][SHARED]
            for stored in self._stored:
                stored[slot, written].copy_(stored[source, read])

    def load(self, slot: int) -> None:
        """Puts the last state into the layers; where there is none, they begin anew."""
        for layer in self._layers:
            layer.reset()
        behind = self._behind[slot]
        if not any(behind):
            return
        place = self._places[slot][behind.index(max(behind))]
        for stored, (_, states, at) in zip(self._stored, _states_in(self._layers), strict=True):
            states[at] = stored[slot, place].clone()[None]  # which layers change in place
        for layer in self._layers:
            layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)

    def save(self, slot: int, first: int, token_ids: Sequence[int]) -> None:
        """From the state that was loaded on, the layers have read these tokens, from position `first` on."""
        self._tokens[slot][first:] = token_ids
        self._behind[slot][LIVE] = len(self._tokens[slot])
        place = self._places[slot][LIVE]
        for stored, (state, *_) in zip(self._stored, _states_in(self._layers), strict=True):
            stored[slot, place].copy_(state[0])

"""Models with recurrent layers go back, go on and are copied as if each text had been read at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driftguard_engine.kv_cache import Span
from driftguard_engine.models.device_memory import ModelMemory
from driftguard_engine.models.generic import READ_AGAIN, GenericModel
from driftguard_engine.models.loading import Placement, load
from driftguard_engine.models.recurrent import LIVE, SHARED, SlotStates

from tests.engine.core.target_mtps import SHAPES
from tests.engine.core.tiny import new_module, save

VOCABULARY, LENGTH, SLOTS = 64, 40, 3
_USUAL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
KINDS: dict[str, dict[str, Any]] = {
    **{kind: SHAPES[kind] for kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")},
    "mamba2": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "chunk_size": 16}
    | {"num_heads": 8, "head_dim": 8, "n_groups": 2},
    "bamba": _USUAL | _MAMBA | {"attn_layer_indices": [1]},
    "granitemoehybrid": _USUAL
    | _MAMBA
    | {"layer_types": ["mamba", "attention"], "num_local_experts": 2, "num_experts_per_tok": 1}
    | {"shared_intermediate_size": 16},
    "falcon_h1": _USUAL | _MAMBA | {"mamba_d_ssm": 64, "head_dim": 8},
    "lfm2": _USUAL | {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": _USUAL | _EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": _USUAL | {"num_hidden_layers": 4},
    "olmo_hybrid": _USUAL
    | {"layer_types": ["linear_attention", "full_attention"]}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "nemotron_h": _USUAL
    | {"num_hidden_layers": 3, "hybrid_override_pattern": "M*-", "head_dim": 8, "chunk_size": 16}
    | {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 8},
    "zamba2": _USUAL
    | {"num_key_value_heads": 4, "attention_hidden_size": 64, "attention_head_dim": 16}
    | {"mamba_d_state": 8, "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_ngroups": 1, "chunk_size": 16}
    | {"layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1], "num_mem_blocks": 1},
    "zaya": _USUAL,
}


def most_apart(module: Any, model: GenericModel, seed: int = 11, rounds: int = 40) -> float:
    """What is read in pieces, taken back in part and copied, against the whole text."""
    rng, held, found = random.Random(seed), [list[int]() for _ in range(SLOTS)], 0.0
    for _ in range(rounds):
        slot, other = rng.sample(range(SLOTS), 2)
        way = rng.choice(["decode", "decode", "decode", "forward", "prefill", "copy", "anew"])
        if way == "copy":
            if held[other] and held[other] != held[slot]:
                model.share(other)
                model.copy(other, Span(slot, 0, len(held[other])))
                held[slot] = [*held[other]]
            continue
        start = 0 if way == "anew" else len(held[slot]) - rng.choice([0, 0, 1, 2, 3, 9])
        del held[slot][max(start, 0) :]
        start, new = len(held[slot]), [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 6))]
        if start + len(new) > LENGTH:
            held[slot].clear()
            continue
        held[slot] += new
        if way == "prefill":
            model.prefill(new, [Span(slot, start, len(new))])
            continue
        if way == "decode":
            logits = model.decode(torch.tensor([new]), torch.tensor([start]), torch.tensor([slot]))[0]
        else:
            logits = model.forward(new, [Span(slot, start, len(new))])
        with torch.inference_mode():
            expected = module(torch.tensor([held[slot]])).logits[0, start:]
        found = max(found, float((logits - expected).abs().max() / expected.abs().max()))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_in_pieces_taken_back_and_copied_is_as_the_whole_text(kind: str) -> None:
    module = new_module(kind, seed=3, vocabulary=VOCABULARY, **KINDS[kind])
    model = GenericModel(module, SLOTS, LENGTH)
    assert model.recurrent
    assert most_apart(module, model) < 1e-4


def not_put_back(patched: pytest.MonkeyPatch) -> None:
    cut = SlotStates.cut

    def kept(self: SlotStates, slot: int, start: int) -> int:
        if self._behind[slot][LIVE] > start:
            self._behind[slot][LIVE] = start
        return cut(self, slot, start)

    patched.setattr(SlotStates, "cut", kept)


def accepted_tokens_not_read_again(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(SlotStates, "behind", lambda *_: [])


def of_another_slot(patched: pytest.MonkeyPatch) -> None:
    load = SlotStates.load

    def wrong(self: SlotStates, slot: int) -> None:
        load(self, slot if slot == 0 or not any(self._behind[0]) else 0)

    patched.setattr(SlotStates, "load", wrong)


def forgetting(states: str) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patched: pytest.MonkeyPatch) -> None:
        load = SlotStates.load

        def forget(self: SlotStates, slot: int) -> None:
            load(self, slot)
            for layer in self._layers:
                for state in getattr(layer, states).values():
                    state.zero_()

        patched.setattr(SlotStates, "load", forget)

    return plant


def copied_from_what_was_read_last(patched: pytest.MonkeyPatch) -> None:
    copy = SlotStates.copy

    def of_all(self: SlotStates, source: int, slot: int, start: int, end: int) -> None:
        self._behind[source][SHARED], self._places[source][SHARED] = end, self._places[source][LIVE]
        copy(self, source, slot, start, end)

    patched.setattr(SlotStates, "copy", of_all)


@pytest.mark.parametrize(
    "plant",
    [
        not_put_back,
        accepted_tokens_not_read_again,
        of_another_slot,
        forgetting("conv_states"),
        forgetting("recurrent_states"),
        copied_from_what_was_read_last,
    ],
)
def test_a_state_that_is_not_the_texts_is_noticed(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    module = new_module("qwen3_next", seed=3, vocabulary=VOCABULARY, **KINDS["qwen3_next"])
    model = GenericModel(module, SLOTS, LENGTH)
    plant(monkeypatch)
    assert most_apart(module, model) > 1e-2


def test_few_accepted_tokens_are_read_again_with_new_ones_and_many_in_a_pass_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = new_module("qwen3_next", seed=3, vocabulary=VOCABULARY, **KINDS["qwen3_next"])
    model = GenericModel(module, 1, LENGTH)
    read: list[int] = []
    original = model._pass

    def counted(token_ids: list[int], *given: Any, **options: Any) -> torch.Tensor:
        read.append(len(token_ids))
        return original(token_ids, *given, **options)

    monkeypatch.setattr(model, "_pass", counted)

    def step(start: int, count: int) -> list[int]:
        read.clear()
        model.decode(torch.ones(1, count, dtype=torch.int64), torch.tensor([start]), torch.tensor([0]))
        return read

    model.prefill([5] * 20, [Span(0, 0, 20)])
    assert step(20, 4) == [4]
    assert step(24, 4) == [4]  # all were accepted
    for again in range(2, READ_AGAIN + 1, 2):
        assert step(24 + again, 4) == [again + 4]
    again = READ_AGAIN + 2
    assert step(24 + again, 4) == [again, 4]
    assert step(24 + again + 1, 4) == [1 + 4]


@pytest.mark.parametrize("kind", ["qwen3_next", "falcon_h1", "mamba2", "lfm2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_memory_that_is_computed_is_what_torch_allocates(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    directory = save(tmp_path / kind, kind, seed=1, **KINDS[kind])
    placement = Placement(dtype, torch.device("cpu"), slots=3, max_length=50, spare=7)
    model = load(directory, placement, field="target").model
    assert isinstance(model, GenericModel)
    assert model._states is not None
    kept = [*model._store.keys, *model._store.values, *model._states._stored]
    assert ModelMemory.read("target", directory, dtype).cache(placement) == sum(each.nbytes for each in kept)

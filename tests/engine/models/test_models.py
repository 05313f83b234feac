"""Both model paths give transformers' logits, however a sequence is cut into spans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from driftguard_engine.kv_cache import Span
from driftguard_engine.models.base import Features, TokenModel
from driftguard_engine.models.generic import GenericModel
from driftguard_engine.models.llama import LlamaModel
from driftguard_engine.models.llama_weights import supports
from transformers import AutoConfig

from tests.engine.core.tiny import new_module

VOCABULARY = 97
SEQUENCE = torch.randint(0, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(0))


def in_pieces(model: TokenModel) -> torch.Tensor:
    """Prefilled, verified in a span beside other slots, then token by token: logits of positions 21 on."""
    ids = SEQUENCE[0].tolist()
    model.prefill(ids[:16], [Span(1, 0, 16)])
    model.prefill(ids[16:21] + ids[:9], [Span(1, 16, 5), Span(2, 0, 9)])
    # A rejected run: what it wrote is overwritten below.
    model.forward([1, 2, 3, 4], [Span(1, 21, 4)])
    mixed = model.forward([*ids[9:12], *ids[21:26], ids[0]], [Span(2, 9, 3), Span(1, 21, 5), Span(0, 0, 1)])
    singles = [model.forward([ids[at]], [Span(1, at, 1)]) for at in range(26, 40)]
    return torch.cat([mixed[3:8], *singles])


def expected(module: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = module(SEQUENCE).logits[0, 21:]
    return logits


LEAN = [
    ("llama", {}),
    ("odd_llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"num_key_value_heads": 1}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    ("qwen2", {}),
    ("qwen3", {}),
    ("mistral", {}),
]


@pytest.mark.parametrize(("kind", "changes"), LEAN)
def test_the_lean_path_gives_the_logits_of_transformers(kind: str, changes: dict[str, Any]) -> None:
    module = new_module(kind, seed=1, vocabulary=VOCABULARY, **changes)
    assert supports(module.config, 64)
    torch.testing.assert_close(in_pieces(LlamaModel(module, 3, 64)), expected(module), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize(("kind", "changes"), LEAN)
def test_the_lean_path_on_tensors_gives_the_logits_of_transformers(
    monkeypatch: pytest.MonkeyPatch, kind: str, changes: dict[str, Any], on_host: bool
) -> None:
    """Prefilled by spans, then decoded in a batch of two slots, a rejected run and beyond the context.

    on_host: as on the CPU, and not as on a GPU.
    """
    monkeypatch.setattr(LlamaModel, "_reads_on_host", lambda *_: on_host)
    module = new_module(kind, seed=1, vocabulary=VOCABULARY, **changes)
    model, ids = LlamaModel(module, 3, 40, spare=4), SEQUENCE[0].tolist()
    model.prefill([*ids[:20], *ids[:9]], [Span(2, 0, 20), Span(0, 0, 9)])

    def decode(run: list[list[int]], starts: list[int], slots: list[int]) -> torch.Tensor:
        return model.decode(torch.tensor(run), torch.tensor(starts), torch.tensor(slots))

    decode([[ids[20], 1, 2, 3], [4, 3, 2, 1]], [20, 9], [2, 0])
    runs = [
        decode([ids[9 + at : 13 + at], ids[21 + at : 25 + at]], [9 + at, 21 + at], [0, 2]) for at in (0, 4)
    ]
    run, starts, slots = [[*ids[29:], 7, 7], ids[17:30]], [29, 17], [2, 0]
    last = decode(run, starts, slots)
    logits = torch.cat([runs[0][1], runs[1][1], last[0, :11]])
    torch.testing.assert_close(logits, expected(module), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last[1, 4:], expected(module)[:9], rtol=1e-4, atol=1e-4)
    room = torch.zeros(2, 3, 50)  # one token of each row, the first 50 of its logits
    given = [torch.tensor(each) for each in (run, [3, 20], starts, slots)]
    model.decode_into(room[:, 1], given[0], given[1], given[2], given[3])
    torch.testing.assert_close(room[:, 1], last[[0, 1], [3, 7], :50], rtol=1e-4, atol=1e-4)
    assert not room[:, ::2].any()


def long_rope(original: int) -> dict[str, Any]:
    return {
        "original_max_position_embeddings": original,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [1.0, 1.5, 3.0, 6.0],
        },
    }


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gpt2", {}),
        ("gpt_neox", {}),
        ("qwen2", {}),
        ("llama", {}),
        # The text grows longer than what takes short factors, or the context is no longer than that.
        ("phi3", long_rope(24)),
        ("phi3", long_rope(64)),
    ],
)
def test_the_generic_path_gives_the_logits_of_transformers(kind: str, changes: dict[str, Any]) -> None:
    module = new_module(kind, seed=1, vocabulary=VOCABULARY, **changes)
    known = expected(module)
    torch.testing.assert_close(in_pieces(GenericModel(module, 3, 64)), known, rtol=1e-4, atol=1e-4)


def features_in_pieces(model: TokenModel, layers: tuple[int, ...]) -> torch.Tensor:
    """Of the whole SEQUENCE, read and decoded beside another one."""
    ids, found = SEQUENCE[0].tolist(), []

    def read(part: slice, call: Callable[[Features], object]) -> None:
        features = Features(layers)
        call(features)
        found.append(features.of(layers)[part])

    read(
        slice(9, 25),
        lambda taken: model.prefill([*ids[:9], *ids[:16]], [Span(2, 0, 9), Span(1, 0, 16)], taken),
    )
    fed, starts = torch.tensor([[*ids[9:12], 0], ids[16:20]]), torch.tensor([9, 16])
    read(slice(3, 7), lambda taken: model.decode(fed, starts, torch.tensor([2, 1]), [3, 4], taken))
    read(slice(None), lambda taken: model.forward(ids[20:], [Span(1, 20, 20)], taken))
    return torch.cat(found)


@pytest.mark.parametrize(
    ("kind", "path"), [("llama", "lean"), ("odd_llama", "lean"), ("qwen3", "lean"), ("gpt2", "generic")]
)
def test_features_are_the_hidden_states_of_transformers(kind: str, path: str) -> None:
    module = new_module(kind, seed=1, vocabulary=VOCABULARY)
    model: TokenModel = LlamaModel(module, 3, 64) if path == "lean" else GenericModel(module, 3, 64)
    with torch.inference_mode():
        states = module(SEQUENCE, output_hidden_states=True).hidden_states
    known = torch.cat([states[layer][0] for layer in (1, 0)], -1)
    torch.testing.assert_close(features_in_pieces(model, (1, 0)), known, rtol=1e-4, atol=1e-4)


def test_features_of_tensors_are_the_hidden_states_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the rows are computed whole."""
    monkeypatch.setattr(LlamaModel, "_reads_on_host", lambda *_: False)
    module = new_module("llama", seed=1, vocabulary=VOCABULARY)
    model, features, ids = LlamaModel(module, 2, 64), Features((1, 0)), SEQUENCE[0].tolist()
    model.prefill(ids[:30], [Span(1, 0, 30)])
    model.decode(
        torch.tensor([ids[:10], ids[30:]]), torch.tensor([0, 30]), torch.tensor([0, 1]), None, features
    )
    with torch.inference_mode():
        states = module(SEQUENCE, output_hidden_states=True).hidden_states
    known = torch.cat([states[layer][0] for layer in (1, 0)], -1)
    expected = torch.cat([known[:10], known[30:]])
    torch.testing.assert_close(features.of((1, 0)), expected, rtol=1e-4, atol=1e-4)


def test_a_sliding_window_shorter_than_the_context_is_left_to_the_generic_path() -> None:
    module = new_module("mistral", seed=1, vocabulary=VOCABULARY, sliding_window=8)
    assert not supports(module.config, 64)
    assert supports(module.config, 8)
    torch.testing.assert_close(in_pieces(GenericModel(module, 3, 64)), expected(module), rtol=1e-4, atol=1e-4)


def test_bfloat16_weights_round_no_more_than_in_transformers() -> None:
    module = new_module("llama", seed=1, vocabulary=VOCABULARY).to(torch.bfloat16)
    exact = expected(module.float())
    theirs = (expected(module.to(torch.bfloat16)).float() - exact).square().mean().sqrt()
    ours = (in_pieces(LlamaModel(module, 3, 64)).float() - exact).square().mean().sqrt()
    assert 0 < ours < 1.2 * theirs


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    ],
)
def test_what_the_lean_path_does_not_compute_it_does_not_claim(changes: dict[str, Any]) -> None:
    assert not supports(AutoConfig.for_model("llama", **changes), 64)
    assert not supports(AutoConfig.for_model("gpt_neox", hidden_act="silu"), 64)


@pytest.mark.parametrize(("kind", "path"), [("llama", "lean"), ("odd_llama", "lean"), ("gpt2", "generic")])
def test_decoded_rows_depend_on_nothing_beside_them(kind: str, path: str) -> None:
    """On the CPU, bit for bit: other rows, how many tokens those need, which of them are wanted."""
    module, ids = new_module(kind, seed=1, vocabulary=VOCABULARY), SEQUENCE[0].tolist()

    def new_model() -> TokenModel:
        model = LlamaModel(module, 3, 64) if path == "lean" else GenericModel(module, 3, 64)
        model.prefill([*ids[:20], *ids[:9], *ids[:5]], [Span(2, 0, 20), Span(0, 0, 9), Span(1, 0, 5)])
        return model

    def decoded(rows: list[int]) -> list[torch.Tensor]:
        starts, slots, counts = ([each[row] for row in rows] for each in ([20, 9, 5], [2, 0, 1], [4, 1, 3]))
        fed = [
            [*ids[start : start + count], 0, 0, 0, 0][:4] for start, count in zip(starts, counts, strict=True)
        ]
        model = new_model()
        places = (torch.tensor(starts), torch.tensor(slots))
        logits = model.decode(torch.tensor(fed), *places, counts)
        lasts, chosen = torch.full((len(rows), VOCABULARY), -7.0), torch.tensor(counts) - 1
        chosen += 4 * torch.arange(len(rows))
        model.decode_into(lasts, torch.tensor(fed), chosen, *places, [row != 1 for row in rows])
        return [
            torch.cat([each[:count], last[None]])
            for each, count, last in zip(logits, counts, lasts, strict=True)
        ]

    together = decoded([0, 1, 2])
    for row, logits in enumerate(together):
        if row == 1:
            assert (logits[-1] == -7).all()
        else:
            assert torch.equal(logits[-1], logits[-2])
            assert torch.equal(logits, decoded([row])[0])

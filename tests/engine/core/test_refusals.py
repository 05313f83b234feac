"""Every bad input is refused by name, and nothing else suffers."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
from driftguard_engine.config import EngineConfig, InvalidConfig
from driftguard_engine.core import EngineBusy, InvalidModel, InvalidRequest
from driftguard_engine.engine import Engine
from safetensors.torch import load_file, save_file

from driftguard.records.acceptance_record import MAX_POSITIONS
from tests.engine.core.eagle3_heads import load_target, save_random_head
from tests.engine.core.heads import save_random
from tests.engine.core.tiny import CONTEXT, letter_tokenizer, request, save, serve
from tests.engine.server.tiny_models import byte_tokenizer


@pytest.fixture
def good(models: Path, tmp_path: Path) -> Path:
    return shutil.copytree(models / "llama", tmp_path / "good")


@pytest.fixture(scope="module")
def engine(new_engine: Callable[..., Engine]) -> Engine:
    return new_engine(max_waiting=2, max_batch=1)


def refused(engine: Engine, directory: Path | str) -> str:
    with pytest.raises(InvalidModel) as raised:
        engine.load_draft(str(directory))
    assert raised.value.field == "draft"
    return raised.value.detail


def test_pickled_weights_are_refused_by_their_name_and_with_the_remedy(engine: Engine, good: Path) -> None:
    weights = load_file(good / "model.safetensors")
    (good / "model.safetensors").unlink()
    torch.save(weights, good / "pytorch_model.bin")
    message = refused(engine, good)
    assert "pytorch_model.bin" in message
    assert "safe_serialization=True" in message


def test_missing_directories_and_files_are_named(engine: Engine, good: Path, tmp_path: Path) -> None:
    assert str(tmp_path / "none") in refused(engine, tmp_path / "none")
    assert "is a file" in refused(engine, good / "config.json")
    (good / "model.safetensors").unlink()
    assert "no *.safetensors" in refused(engine, good)
    (good / "config.json").unlink()
    assert "no config.json" in refused(engine, good)


def test_broken_and_incomplete_weights_are_refused(engine: Engine, good: Path) -> None:
    weights = load_file(good / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, good / "model.safetensors", metadata={"format": "pt"})
    assert "lack model.layers.1.mlp.up_proj.weight" in refused(engine, good)
    (good / "model.safetensors").write_bytes(b"not a model")
    assert "cannot be loaded" in refused(engine, good)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused_by_their_name(
    engine: Engine, good: Path, value: float
) -> None:
    plant(good, "model.layers.1.mlp.up_proj.weight", value)
    assert "model.layers.1.mlp.up_proj.weight is not finite in torch.float32" in refused(engine, good)


def test_weights_that_overflow_in_the_type_that_serves_are_refused(
    new_engine: Callable[..., Engine], good: Path
) -> None:
    engine = new_engine(dtype="float16")
    plant(good, "model.norm.weight", 1e6)  # finite in the file
    assert "model.norm.weight is not finite in torch.float16" in refused(engine, good)


def test_implausibly_large_weights_are_refused(engine: Engine, good: Path) -> None:
    plant(good, "lm_head.weight", -2e4)
    assert "lm_head.weight holds -20000, beyond 10000" in refused(engine, good)


def test_a_forward_that_overflows_is_refused_although_each_weight_is_plausible(
    new_engine: Callable[..., Engine], good: Path
) -> None:
    engine = new_engine(dtype="float16")
    for name in ("model.norm.weight", "lm_head.weight"):
        plant(good, name, 5_000.0, everywhere=True)
    assert "the logits of fixed tokens are not finite in torch.float16" in refused(engine, good)


def test_weights_without_an_opinion_are_refused(engine: Engine, good: Path) -> None:
    plant(good, "lm_head.weight", 0.0, everywhere=True)
    assert "every token gets the same logit" in refused(engine, good)


def test_weights_of_another_shape_and_cut_short_are_refused(engine: Engine, good: Path) -> None:
    file, name = good / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    weights = load_file(file)
    save_file(weights | {name: weights[name][1:].clone()}, file, metadata={"format": "pt"})
    assert "cannot be loaded" in refused(engine, good)
    save_file(weights, file, metadata={"format": "pt"})
    file.write_bytes(file.read_bytes()[:-1_000])
    assert "cannot be loaded" in refused(engine, good)


def test_a_draft_that_is_not_as_it_was_made_is_refused_by_the_name_of_the_file(
    engine: Engine, good: Path
) -> None:
    seal(good)
    engine.load_draft(str(good), "sealed")
    weights = good / "model.safetensors"
    made = weights.read_bytes()
    weights.write_bytes(made[:-1] + bytes([made[-1] ^ 1]))
    assert f"{weights} was changed or is damaged: its SHA-256 is" in refused(engine, good)
    weights.unlink()
    save_file({"a": torch.zeros(1)}, good / "model-2.safetensors")
    assert "model-2.safetensors is not in SHA256SUMS" in refused(engine, good)
    weights.write_bytes(made)
    for content in (b"no list", b"\xff"):
        (good / "SHA256SUMS").write_bytes(content)
        assert "SHA256SUMS" in refused(engine, good)


def seal(directory: Path) -> None:
    names = sorted(path.name for path in directory.iterdir())
    sums = subprocess.run(["sha256sum", *names], cwd=directory, capture_output=True, check=True)
    (directory / "SHA256SUMS").write_bytes(sums.stdout)


def plant(directory: Path, name: str, value: float, *, everywhere: bool = False) -> None:
    """In the middle of a tensor of the stored weights."""
    file = directory / "model.safetensors"
    weights = load_file(file)
    tensor = weights[name].flatten()
    tensor[slice(None) if everywhere else len(tensor) // 2] = value
    save_file(weights | {name: tensor.view_as(weights[name])}, file, metadata={"format": "pt"})


def test_another_tokenizer_is_refused(engine: Engine, tmp_path: Path) -> None:
    other = save(tmp_path / "other", tokenizer=letter_tokenizer(6))
    message = refused(engine, other)
    assert "another tokenizer" in message
    assert "6 and 257 tokens" in message


def test_other_special_tokens_are_refused(engine: Engine, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = "a"
    message = refused(engine, save(tmp_path / "other", tokenizer=tokenizer))
    assert "eos_token_id" in message


@pytest.fixture
def head(models: Path, tmp_path: Path) -> Path:
    """With all optional parts: a pruned vocabulary, an embedding of its own, a norm before fc."""
    target = load_target(models / "llama")
    save_random_head(tmp_path / "head", target, range(0, 257, 2), (0, 1), embeds=True, norm_before_fc=True)
    (tmp_path / "head" / "SHA256SUMS").unlink()
    return tmp_path / "head"


def change(head: Path, **tensors: torch.Tensor | None) -> None:
    """Names with - for a dot. None: without this one."""
    file = head / "model.safetensors"
    given = {name.replace("-", "."): each for name, each in tensors.items()}
    kept = {name: each for name, each in (load_file(file) | given).items() if each is not None}
    save_file(kept, file, metadata={"format": "pt"})


def configure(head: Path, layer: dict[str, Any] | None = None, **changes: Any) -> None:
    told = json.loads((head / "config.json").read_text())
    told["transformer_layer_config"] |= layer or {}
    (head / "config.json").write_text(json.dumps(told | changes))


SMALL = torch.zeros(8, 8)


def test_a_head_for_a_target_whose_embeddings_are_narrower_than_its_layers_is_refused(
    head: Path, tmp_path: Path
) -> None:
    """This one fits the embeddings, and its target's hidden states would be too wide for it."""
    target = save(tmp_path / "opt", "opt")
    engine = Engine(EngineConfig(target, drafter="none", max_batch=2, max_length=64))
    assert "embeddings have size 32, and its layers 48" in refused(engine, head)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"fc-weight": None}, "fc.weight is missing"),
        ({"layers-0-hidden_norm-weight": None}, "layers.0.hidden_norm.weight is missing"),
        (
            {"lm_head-weight": None},
            "lm_head.weight is missing, and the target's is of its 257 tokens in their order, not of the 129",
        ),
        ({"input_norm-weight": None}, "input_norm.weight is missing"),
        (
            {"fc-weight": torch.zeros(32, 96)},
            "fc.weight is [32, 96], needed is [32, 64] for a target of hidden size 32",
        ),
        (
            {"layers-0-self_attn-q_proj-weight": torch.zeros(32, 32)},
            "layers.0.self_attn.q_proj.weight is [32, 32], needed is [32, 64]",
        ),
        (
            {"embed_tokens-weight": torch.zeros(256, 32)},
            "embed_tokens.weight is [256, 32], needed is [257, 32]",
        ),
        ({"norm-weight": torch.full((32,), math.nan)}, "norm.weight is not finite"),
        ({"mask_hidden": SMALL}, "mask_hidden is no part of an EAGLE-3 head"),
        ({"d2t": None}, "d2t is missing, and draft_vocab_size is 129, not the target's 257"),
        ({"d2t": torch.zeros(128, dtype=torch.int64)}, "d2t is [128], draft_vocab_size is 129"),
        ({"d2t": torch.arange(129) * 2}, "d2t maps id 86 to 258, beyond the target's 0 to 256"),
        ({"d2t": -torch.arange(1, 130)}, "d2t maps id 0 to -1, beyond the target's 0 to 256"),
        ({"d2t": -torch.arange(129)}, "d2t maps two ids to one token"),
        ({"t2d": torch.zeros(257, dtype=torch.bool)}, "t2d names other tokens than d2t"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_a_head_whose_weights_do_not_fit_is_refused_by_the_name_of_the_tensor(
    engine: Engine, head: Path, tensors: dict[str, torch.Tensor | None], reason: str
) -> None:
    change(head, **tensors)
    told = refused(engine, head)
    assert reason in told
    assert str(head) in told


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"eagle_aux_hidden_state_layer_ids": [0, 2]},
            "eagle_aux_hidden_state_layer_ids: 2 is not between 0 and 1",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [0, "1"]}, "eagle_aux_hidden_state_layer_ids: '1' is not"),
        ({"eagle_aux_hidden_state_layer_ids": 3}, "eagle_aux_hidden_state_layer_ids: 3 is no list of layers"),
        (
            {"eagle_aux_hidden_state_layer_ids": None},
            "eagle_aux_hidden_state_layer_ids: 2 is not between 0 and 1",
        ),
        ({"draft_vocab_size": 258}, "draft_vocab_size: 258 is not between 1 and 257"),
        ({"draft_vocab_size": None}, "draft_vocab_size: None is not"),
        ({"transformer_layer_config": 5}, "transformer_layer_config cannot be used"),
        ({"layer": {"model_type": "gpt2"}}, "a layer of 'gpt2' with these settings is not computed"),
        ({"layer": {"hidden_act": "gelu"}}, "a layer of 'llama' with these settings is not computed"),
        ({"layer": {"num_hidden_layers": 2}}, "layers.1.self_attn.q_proj.weight is missing"),
        ({"layer": {"num_hidden_layers": 0}}, "transformer_layer_config.num_hidden_layers: 0"),
        ({"layer": {"vocab_size": 300}}, "transformer_layer_config.vocab_size: 300, the target's is 257"),
        ({"layer": {"hidden_size": 64}}, "embed_tokens.weight is [257, 32], needed is [257, 64]"),
    ],
    ids=str,
)
def test_a_head_whose_configuration_does_not_fit_is_refused_by_the_name_of_the_setting(
    engine: Engine, head: Path, changes: dict[str, Any], reason: str
) -> None:
    configure(head, **changes)
    assert reason in refused(engine, head)


@pytest.mark.parametrize(
    ("kind", "tensors", "changes", "reason"),
    [
        ("peagle", {"mask_hidden": None}, {}, "mask_hidden is missing"),
        ("peagle", {}, {"mask_token_id": None}, "mask_token_id: None is not between 0 and 256"),
        ("mtp", {"mtp_layers-0-input_proj-weight": None}, {}, "mtp_layers.0.input_proj.weight is missing"),
        ("mtp", {"d2t": SMALL}, {}, "d2t is no part of an MTP head"),
        ("mtp", {}, {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers: 2, only 1 is computed"),
        ("mtp", {}, {"layer": {"model_type": "qwen3_next"}}, "a layer of 'qwen3_next' with these settings"),
        ("mtp", {}, {"layer": {"hidden_size": 64}}, "hidden_size: 64, the target's is 32"),
        ("eagle", {"fusion_fc-bias": SMALL}, {}, "fusion_fc.bias is no part of an EAGLE head"),
        ("eagle", {}, {"layernorms": True}, "embedding_layernorm.weight is missing"),
        ("dflash", {}, {"block_size": 1}, "block_size: 1 is not between 2 and 160"),
        ("dflash", {}, {"mask_token_id": 257}, "mask_token_id: 257 is not between 0 and 256"),
        ("dflash", {}, {"layer": {"model_type": "llama"}}, "'llama', only layers of qwen3 are computed"),
        ("dflash", {}, {"aux_hidden_state_layer_ids": [2]}, "aux_hidden_state_layer_ids: 2 is not between 0"),
        ("dspark", {}, {"markov_head_type": "mlp"}, "markov_head_type: 'mlp' is not one of vanilla, gated"),
        ("dspark", {}, {"markov_rank": 8}, "markov_head.markov_w1.weight is [257, 4], needed is [257, 8]"),
        ("dspark", {}, {"speculators_model_type": "xpress"}, "of the speculators_model_type 'xpress'"),
    ],
    ids=str,
)
def test_a_head_of_another_kind_that_does_not_fit_is_refused_by_name(
    engine: Engine,
    models: Path,
    tmp_path: Path,
    kind: str,
    tensors: dict[str, torch.Tensor | None],
    changes: dict[str, Any],
    reason: str,
) -> None:
    save_random(tmp_path / "head", kind, load_target(models / "llama"))
    (tmp_path / "head" / "SHA256SUMS").unlink()
    change(tmp_path / "head", **tensors)
    configure(tmp_path / "head", **changes)
    assert reason in refused(engine, tmp_path / "head")


@pytest.mark.parametrize("part", ["embed_tokens", "lm_head"])
def test_a_head_of_another_width_needs_what_it_would_share(engine: Engine, head: Path, part: str) -> None:
    if part == "lm_head":  # for which it drafts all tokens
        change(head, d2t=None, t2d=None)
        configure(head, draft_vocab_size=257)
    change(head, **{f"{part}-weight": None})
    engine.load_draft(str(head), f"shares {part}")
    configure(head, layer={"hidden_size": 64})
    assert f"{part}.weight is missing, and the target's is of size 32, not 64" in refused(engine, head)


def test_a_head_that_is_cut_short_or_changed_is_refused(engine: Engine, head: Path) -> None:
    seal(head)
    engine.load_draft(str(head), "sealed head")
    weights = head / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert f"{weights} was changed or is damaged" in refused(engine, head)
    (head / "SHA256SUMS").unlink()
    assert "the weights cannot be read" in refused(engine, head)


def test_a_directory_without_tokenizer_is_refused(engine: Engine, good: Path) -> None:
    for path in good.glob("tokenizer*"):
        path.unlink()
    assert "no usable tokenizer" in refused(engine, good)


def test_a_model_of_an_unknown_kind_is_refused(engine: Engine, good: Path) -> None:
    (good / "config.json").write_text('{"model_type": "unheard_of"}', encoding="utf-8")
    assert "cannot be loaded" in refused(engine, good)


@pytest.mark.parametrize(
    ("kind", "shape", "reason"),
    [
        ("mamba", {"hidden_size": 32}, "goes on from its recurrent state to other logits than those of"),
        ("rwkv", {"hidden_size": 32, "attention_hidden_size": 32}, "keeps a recurrent state that is not in"),
        ("minimax", {"hidden_size": 32, "head_dim": 8}, "cannot be computed from a cache of slots"),
        ("openai-gpt", {"n_embd": 32, "n_head": 4}, "does not see what its cache holds"),
        ("bert", {"hidden_size": 32, "num_attention_heads": 4}, "lets a token see those behind it"),
    ],
)
def test_a_model_that_does_not_go_on_from_its_cache_is_refused(
    tmp_path: Path, kind: str, shape: dict[str, Any], reason: str
) -> None:
    directory = save(tmp_path / kind, kind, num_hidden_layers=2, n_layer=2, **shape)
    with pytest.raises(InvalidModel, match=rf"^target: .*\({kind}\) cannot serve: it {reason}"):
        Engine(EngineConfig(directory, drafter="ngram", max_length=64))


def test_a_refused_draft_leaves_the_engine_as_it_was(engine: Engine, tmp_path: Path) -> None:
    before = (engine.draft, engine.drafts)
    refused(engine, tmp_path)
    assert (engine.draft, engine.drafts) == before
    assert serve(engine, request())["r"].finish_reason == "length"


BAD_PARAMS: list[dict[str, Any]] = [
    {"temperature": math.nan},
    {"temperature": math.inf},
    {"temperature": -0.1},
    {"temperature": 1e9},
    {"top_p": 0.0},
    {"top_p": 1.01},
    {"top_p": math.nan},
    {"top_k": -5},
    {"max_tokens": 0},
    {"max_tokens": True},
    {"seed": -1},
    {"seed": 2**63},
    {"num_speculative_tokens": -1},
    {"num_speculative_tokens": 17},
    {"stop": ("",)},
]


@pytest.mark.parametrize("params", BAD_PARAMS, ids=str)
def test_a_bad_parameter_is_refused_by_its_name_and_value(engine: Engine, params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as raised:
        engine.submit(request(**params))
    (field, value), *_ = params.items()
    assert raised.value.field == field
    assert repr(value) in raised.value.detail
    assert not engine.has_work()


def test_bad_prompts_are_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match=f"{CONTEXT} tokens, but the context is {CONTEXT}"):
        engine.submit(request("r", [1] * CONTEXT))
    with pytest.raises(InvalidRequest, match=r"257 is not a token id; the vocabulary is 0 .. 256"):
        engine.submit(request("r", [1, 257]))
    with pytest.raises(InvalidRequest, match="empty"):
        engine.submit(request("r", []))
    assert not engine.has_work()


@pytest.mark.parametrize("version", ["", "v" * 257, "v\0", "\ud800"])
def test_a_version_that_no_record_may_hold_is_refused(engine: Engine, good: Path, version: str) -> None:
    (good / "driftguard_training.json").write_text(json.dumps({"version": version}), encoding="utf-8")
    with pytest.raises(InvalidModel, match=r"driftguard_training\.json: version"):
        engine.load_draft(str(good))


def test_the_tokens_of_a_prompt_are_checked_once_for_all_its_choices(
    new_engine: Callable[..., Engine],
) -> None:
    class Counted(tuple[int, ...]):
        __slots__ = ()
        passes: ClassVar[int] = 0

        def __iter__(self) -> Iterator[int]:
            Counted.passes += 1
            return super().__iter__()

    def passes(prompt: Counted, choices: int) -> int:
        engine = new_engine()
        Counted.passes = 0
        engine.submit_all([replace(request(str(index)), prompt_token_ids=prompt) for index in range(choices)])
        return Counted.passes

    assert passes(Counted([1, 2]), 16) == passes(Counted([1, 2]), 1)


def test_a_full_queue_and_a_doubled_id_are_refused_and_lose_nothing(engine: Engine) -> None:
    for name in "ab":
        engine.submit(request(name))
    with pytest.raises(EngineBusy, match="queue is full"):
        engine.submit_all([request("c"), request("d")])
    engine.submit(request("c"))
    with pytest.raises(InvalidRequest, match="'a' is already in the engine"):
        engine.submit(request("a"))
    with pytest.raises(EngineBusy, match="queue is full"):
        engine.submit(request("d"))
    assert set(serve(engine)) == {"a", "b", "c"}
    assert set(serve(engine, request("a"))) == {"a"}


def test_a_group_that_never_fits_is_not_told_to_come_back(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match=r"4 sequences .* at most 3 .*send fewer prompts or choices"):
        engine.submit_all([request(name) for name in "abcd"])
    assert not engine.has_work()
    engine.submit_all([request(name) for name in "abc"])
    assert set(serve(engine)) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("max_batch", {"max_batch": 0}),
        ("max_length", {"max_length": 1}),
        ("num_speculative_tokens", {"num_speculative_tokens": 0}),
        ("max_speculative_tokens", {"max_speculative_tokens": 3}),
        ("max_speculative_tokens", {"max_speculative_tokens": MAX_POSITIONS + 1}),
        ("ngram_max_tokens", {"ngram_max_tokens": 1}),
        ("lookahead_window", {"lookahead_window": 0}),
        ("lookahead_ngram", {"lookahead_ngram": 2}),
        ("lookahead_candidates", {"lookahead_candidates": 0}),
        ("dtype", {"dtype": "int8"}),
        ("device", {"device": "tpu"}),
        ("drafter", {"drafter": "no_such_drafter"}),
        ("draft", {"draft": None}),
        ("draft", {"drafter": "eagle3", "draft": None}),
        ("draft", {"drafter": "eagle", "draft": None}),
        ("draft", {"drafter": "lookahead"}),
        ("draft", {"drafter": "none"}),
        ("threads", {"threads": 0}),
    ],
)
def test_a_bad_configuration_names_its_field(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match=f"^{field}: "):
        EngineConfig(**{"target": "t", "draft": "d"} | changes)


def test_on_a_gpu_attention_is_not_left_to_what_plans_each_length_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Settled before the models are placed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("driftguard_engine.engine.placement_of", Mock(side_effect=InvalidConfig("no GPU")))
    before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        with pytest.raises(InvalidConfig, match="no GPU"):
            Engine(EngineConfig("target", "draft", device="cuda"))
        assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_an_unknown_verification_rule_is_refused(new_engine: Callable[..., Engine]) -> None:
    with pytest.raises(InvalidConfig, match="verification: 'tree' is not one of token, block"):
        new_engine(verification="tree")

"""Targets that the engine serves, of families whose configurations tell their sizes in other places."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driftguard_training.__main__ import main
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Mamba2Config,
    Mamba2ForCausalLM,
    PreTrainedModel,
)

from tests.training.small_models import (
    CONTEXT_TOKENS,
    VOCABULARY,
    save_directory,
    small_model,
    small_tokenizer,
    write_traffic,
)

_ENDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}


def _gemma3() -> PreTrainedModel:
    """Reads images too: what its language model is like is a part of its configuration."""
    text = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    text |= {"max_position_embeddings": CONTEXT_TOKENS, **_ENDS}
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    vision |= {"image_size": 28, "patch_size": 14}
    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision, image_token_index=3)
    )


def _mamba2() -> PreTrainedModel:
    """Has no positions, and so no context."""
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1}
    sizes |= {"state_size": 8, "chunk_size": 16, "num_heads": 4, "head_dim": 8, "n_groups": 1}
    return Mamba2ForCausalLM(Mamba2Config(**sizes, **_ENDS))


@pytest.mark.parametrize("new_target", [_gemma3, _mamba2])
def test_a_draft_is_scored_and_trained_for_any_target_that_the_engine_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], new_target: Callable[[], PreTrainedModel]
) -> None:
    torch.manual_seed(1)
    model = new_target().train(False)
    target = str(save_directory(tmp_path / "target", model, small_tokenizer()))
    draft = str(save_directory(tmp_path / "draft", small_model(2)))
    traffic = str(write_traffic(tmp_path / "traffic.jsonl", model, requests=16, seed=3))
    models = ["--target", target, "--draft", draft]
    assert main(["evaluate", *models, "--traffic", traffic]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["left_out"] == {}
    assert told["drafts"][0]["segments"][0]["positions"] == 160
    output = ["--output", str(tmp_path / "new"), "--steps", "2", "--minimum-requests", "16"]
    assert main(["distill", *models, "--train", traffic, *output]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["train_requests"] == 16

"""Heads of every kind are trained on what they later draft by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from driftguard_engine.models.dflash_head import read_block_head
from driftguard_engine.models.eagle3_head import read_head
from driftguard_engine.models.fused_head import FusedHead, read_fused_head
from driftguard_engine.models.speculators import TITLES
from driftguard_training.drafts.kinds import load_draft
from driftguard_training.errors import BadModelDirectory
from driftguard_training.heads import Head, features_of, passes_of
from driftguard_training.model_directories import load_model
from transformers import Qwen3Config

from tests.engine.core.eagle3_heads import load_target, sizes_of
from tests.engine.core.heads import reference_of, save_random
from tests.engine.core.tiny import save

TEXT = [7, 3, 250, 3, 9, 11, 7, 3, 250, 80, 81, 82]
DRAFTS = 3


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("eagle", {"bias": True}),
        ("mtp", {"layer": Qwen3Config}),
        ("peagle", {"layers": 2, "token_ids": range(0, 257, 2)}),
        ("dflash", {"token_ids": range(0, 257, 2)}),
        ("dspark", {"markov_kind": "gated"}),
        ("dspark", {"markov_kind": "rnn", "drafts_at_first": False}),
    ],
    ids=str,
)
def test_each_pass_gives_the_logits_of_a_step_of_drafts(
    tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    target = load_target(Path(save(tmp_path / "target", "llama", seed=3)))
    save_random(tmp_path / "head", kind, target, **settings)
    reference, sizes, ids = reference_of(tmp_path / "head", target), sizes_of(target), torch.arange(257)
    head: Head
    if kind in ("mtp", "eagle"):
        head = read_fused_head(tmp_path / "head", sizes, field="draft")
    else:
        reader = read_head if kind == "peagle" else read_block_head
        head, ids = reader(tmp_path / "head", sizes, field="draft")
    embedding = sizes.embedding
    if not isinstance(head, FusedHead) and head.embed_tokens is not None:
        embedding = head.embed_tokens.weight
    with torch.inference_mode():
        states = target(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
        features = torch.cat([states[layer] for layer in features_of(head)], -1)
        passes = list(passes_of(head, target, features, embedding, torch.tensor([TEXT]), DRAFTS))
    for place in range(len(TEXT) - 1 - DRAFTS):
        expected = reference.logits(TEXT[: place + 2], TEXT[place + 2 : place + 2 + DRAFTS])
        found = torch.stack([logits[0, place] for logits in passes])
        torch.testing.assert_close(found, expected[:, ids], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["mtp", "dspark"])
def test_kinds_that_are_not_trained_on_captured_traffic_are_refused(tmp_path: Path, kind: str) -> None:
    directory = Path(save(tmp_path / "target", "llama", seed=3))
    save_random(tmp_path / "head", kind, load_target(directory))
    with pytest.raises(BadModelDirectory, match=f"is {TITLES[kind]}, and only draft models, EAGLE-3"):
        load_draft(tmp_path / "head", load_model(directory, "target"))

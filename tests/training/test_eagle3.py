"""A head is trained on what it later drafts by."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from driftguard_engine.models.eagle3_head import read_head
from driftguard_training.heads import frequent_tokens, head_loss
from driftguard_training.passes import chains

from tests.engine.core.eagle3_heads import Reference, load_target, save_random_head, sizes_of
from tests.engine.core.tiny import save

TEXT = [7, 3, 250, 3, 9, 11, 7, 3, 250, 80, 81, 82]


HEADS: list[dict[str, bool]] = [
    {},
    {"norm_before_fc": True, "norm_output": True},
    {"fc_norm": True, "norm_before_residual": True},
    {"embeds": True, "qwen3": True},
    {"unembeds": False},
]


@pytest.fixture
def directories(tmp_path: Path) -> tuple[Path, Path]:
    return made(tmp_path, {})


def made(directory: Path, norms: dict[str, bool]) -> tuple[Path, Path]:
    target = Path(save(directory / "target", "llama", seed=3))
    token_ids = range(0, 257, 2 if norms.get("unembeds", True) else 1)
    save_random_head(directory / "head", load_target(target), token_ids, (0, 1), **norms)
    return target, directory / "head"


@pytest.mark.parametrize("norms", HEADS, ids=str)
def test_each_pass_gives_the_logits_of_a_chain_of_drafts(tmp_path: Path, norms: dict[str, bool]) -> None:
    directories = made(tmp_path, norms)
    target, reference = load_target(directories[0]), Reference(directories[1], load_target(directories[0]))
    embedding = target.model.embed_tokens.weight
    head, token_ids = read_head(directories[1], sizes_of(target), field="draft")
    with torch.inference_mode():
        states = target(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
        if head.embed_tokens is not None:
            embedding = head.embed_tokens.weight
        features = torch.cat(states[:2], -1)
        passes = list(chains(head, features, embedding, torch.tensor([TEXT]), 3, target.lm_head))
    for place in range(len(TEXT) - 4):
        expected = reference.logits(
            TEXT[: place + 2], TEXT[place + 2 : place + 5]
        )  # a chain of the text itself
        found = torch.stack([logits[0, place] for logits in passes])
        torch.testing.assert_close(found, expected[:, token_ids], rtol=1e-3, atol=1e-3)


def test_acceptance_counts_what_the_target_gives_to_tokens_that_the_head_has_not(
    directories: tuple[Path, Path],
) -> None:
    """sum of min(p, q) by definition, for the first draft of each chain."""
    target = load_target(directories[0])
    embedding = target.model.embed_tokens.weight
    head, token_ids = read_head(directories[1], sizes_of(target), field="draft")
    _, accepted = head_loss(head, target, token_ids, torch.tensor([TEXT]), 2, "nla")
    with torch.inference_mode():
        told = target(torch.tensor([TEXT]), output_hidden_states=True)
        features = torch.cat(told.hidden_states[:2], -1)
        (logits,) = chains(head, features, embedding, torch.tensor([TEXT]), 1, target.lm_head)
    q = torch.zeros(len(TEXT) - 1, 257).index_copy_(1, token_ids, logits[0].softmax(-1))
    p = told.logits[0, 1:].softmax(-1)
    assert accepted[0] == pytest.approx(torch.minimum(p, q).sum(-1).mean().item(), rel=1e-4)
    assert 0 < accepted[1] < 1


def test_the_vocabulary_is_of_the_most_frequent_tokens() -> None:
    streams = [torch.tensor([5, 5, 5, 1, 1, 2]), torch.tensor([4, 4, 2, 2, 9])]
    assert frequent_tokens(streams, 2, 10).tolist() == [2, 5]
    assert frequent_tokens(streams, 3, 10).tolist() == [1, 2, 5]  # of equal ones the first

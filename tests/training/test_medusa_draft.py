"""Medusa heads in service are trained on captured traffic, and scored as the engine then drafts with them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from driftguard_engine.config import EngineConfig
from driftguard_engine.engine import Engine
from driftguard_engine.models.medusa_head import (
    Choices,
    MedusaConfig,
    MedusaHeads,
    assumed_tree,
    most_likely_tree,
)
from driftguard_training.__main__ import main
from driftguard_training.drafts.kinds import load_draft
from driftguard_training.evaluate import evaluate
from driftguard_training.medusa import WEIGHTS, measured_tree, new_heads, save_heads
from driftguard_training.model_directories import load_model, model_version
from driftguard_training.serving import score_batch
from driftguard_training.settings import EvaluateSettings
from driftguard_training.traffic import ServedRequest
from safetensors.torch import load_file

from tests.engine.core.eagle3_heads import load_target
from tests.engine.core.tiny import save
from tests.training.test_eagle3_draft import KNOWN, MOVED, answers, write

K = 4
TREE: Choices = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 1), (0, 0, 0, 0))


class Made(NamedTuple):
    """A target, heads with output layers of their own that know nothing, and captured answers."""

    target: Path
    heads: Path
    train: Path
    held_out: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("made")
    target = Path(save(root / "target", seed=3))
    plain = Engine(EngineConfig(str(target), drafter="none", threads=1))
    moved = answers(plain, 200, MOVED)
    heads = MedusaHeads(MedusaConfig(4, 1, TREE), 32, 257, owns_output=True)
    torch.manual_seed(2)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    save_heads(root / "heads", heads, TREE, torch.float32, {})
    write(root / "train.jsonl", moved[:150])
    write(root / "held_out.jsonl", moved[150:])
    return Made(target, root / "heads", root / "train.jsonl", root / "held_out.jsonl")


def engine_of(made: Made, heads: Path, k: int = K) -> Engine:
    config = EngineConfig(str(made.target), str(heads), "medusa", num_speculative_tokens=k, threads=1)
    return Engine(config)


@pytest.fixture(scope="module")
def candidate(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("candidate") / "heads"
    assert (
        main(
            [
                *("distill", "--target", str(made.target), "--draft", str(made.heads)),
                *("--train", str(made.train), "--output", str(output), "--threads", "1"),
                *(
                    "--steps",
                    "120",
                    "--batch-requests",
                    "8",
                    "--loss",
                    "forward-kl",
                    "--learning-rate",
                    "0.01",
                ),
            ]
        )
        == 0
    )
    return output


@pytest.mark.parametrize("k", [K, 2, 6])
def test_the_score_of_each_answer_is_what_the_engine_counts(made: Made, candidate: Path, k: int) -> None:
    """Also where answers were sampled: what is guessed does not depend on a draw. Of prompts of one token,
    whose first step has no drafts, and of more draft tokens than there are heads."""
    engine = engine_of(made, candidate, k)
    done = [*answers(engine, 40, KNOWN, 0.0), *answers(engine, 40, MOVED, 0.3)]
    target = load_model(made.target, "target")
    served = [
        ServedRequest(
            "a",
            list(one.request.prompt_token_ids),
            list(one.output_token_ids),
            one.request.params.temperature,
            k,
        )
        for one in done
    ]
    scores = score_batch(target, load_draft(candidate, target), served)
    assert sum(one.counts.accepted for one in done) > 60
    for one, score in zip(done, scores, strict=True):
        expected = (one.counts.steps, one.counts.drafted, one.counts.accepted)
        for found in (score.rejection, score.match):
            assert (found.steps, found.drafted, found.accepted_of_answer) == pytest.approx(expected, abs=1e-6)
    sampled = scores[40:]
    expected_of_any = sum(score.rejection.accepted for score in sampled)
    assert expected_of_any == pytest.approx(sum(one.counts.accepted for one in done[40:]), rel=0.15)


def test_heads_learn_captured_traffic_and_the_engine_serves_what_they_have_learned(
    made: Made, candidate: Path
) -> None:
    settings = EvaluateSettings(made.target, (made.heads, candidate), made.held_out, K, 0.1)
    found: Any = evaluate(settings)["drafts"]
    before, after = (draft["segments"][0]["acceptance"] for draft in found)
    assert after > before + 0.05
    told = json.loads((candidate / "driftguard_training.json").read_text())
    assert (told["version"], told["parent"]) == (model_version(candidate), model_version(made.heads))
    config = json.loads((candidate / "config.json").read_text())
    assert config == json.loads((made.heads / "config.json").read_text())
    old, new = (load_file(one / WEIGHTS) for one in (made.heads, candidate))
    assert {name: each.shape for name, each in old.items()} == {
        name: each.shape for name, each in new.items()
    }
    assert not any(torch.equal(each, new[name]) for name, each in old.items())
    engine = engine_of(made, candidate)
    assert (engine.draft.method, engine.draft.version) == ("medusa", told["version"])
    done = answers(engine, 300, MOVED)[200:]
    served = sum(one.counts.accepted for one in done) / sum(one.counts.drafted for one in done)
    assert served == pytest.approx(after, abs=0.05)


def test_a_tree_has_the_paths_with_the_largest_product() -> None:
    assert most_likely_tree([[0.5, 0.3], [0.4, 0.1]], 4) == ((0,), (1,), (0, 0), (1, 0))
    assert len(assumed_tree(4)) == 16


def test_the_measured_tree_has_the_paths_that_text_took_most_often(made: Made) -> None:
    target = load_target(made.target)
    tokens = torch.randint(257, (2, 40), generator=torch.Generator().manual_seed(1))
    # Heads that begin as the identity say again what the target says of the place before.
    heads = new_heads(target, 2, 1)
    again = target(tokens).logits.topk(10).indices
    taken: dict[tuple[int, ...], int] = {}
    for row, place in itertools.product(range(2), range(37)):
        path: tuple[int, ...] = ()
        for depth in range(2):
            found = (again[row, place] == tokens[row, place + 2 + depth]).nonzero()
            if not len(found):
                break
            path = (*path, int(found[0, 0]))
            taken[path] = taken.get(path, 0) + 1
    most = sorted(taken, key=lambda path: (-taken[path], len(path), path))[:3]
    assert set(measured_tree(heads, target, tokens, nodes=3)) == set(most)

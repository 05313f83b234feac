"""A head in service is trained on captured traffic, and scored as the engine then drafts with it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from driftguard_engine.config import EngineConfig
from driftguard_engine.core import FinishedRequest
from driftguard_engine.engine import Engine
from driftguard_training.__main__ import main
from driftguard_training.drafts.base import Draft
from driftguard_training.drafts.kinds import load_draft
from driftguard_training.evaluate import evaluate
from driftguard_training.model_directories import load_model, model_version
from driftguard_training.serving import DraftedAnswer, score_batch
from driftguard_training.settings import EvaluateSettings
from driftguard_training.teacher import Told, read_answers
from driftguard_training.traffic import ServedRequest, TrafficRequest
from safetensors.torch import load_file, save_file

from tests.engine.core.eagle3_heads import load_target, save_distilled_head, save_random_head
from tests.engine.core.tiny import request, save, serve

K = 4
KNOWN = [list(range(first, first + 1 + first % 6)) for first in range(6, 14)]  # of 1 to 6 tokens
MOVED = [list(range(first, first + 2 + first % 5)) for first in range(100, 105)]


class Made(NamedTuple):
    """A target, a head that knows its answers to some prompts, and captured answers to others."""

    target: Path
    head: Path
    train: Path
    held_out: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("made")
    target = Path(save(root / "target", seed=3))
    plain = Engine(EngineConfig(str(target), drafter="none", threads=1))
    end = answers(plain, 24, KNOWN[-1:], 0.0)[-1].output_token_ids[10]
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    plain = Engine(EngineConfig(str(target), drafter="none", threads=1))
    known, moved = answers(plain, 40, KNOWN, 0.0), answers(plain, 200, MOVED)
    texts = [(*one.request.prompt_token_ids, *one.output_token_ids) for one in known]
    head = Path(save_distilled_head(root / "head", target, texts))
    write(root / "train.jsonl", moved[:150])
    write(root / "held_out.jsonl", moved[150:])
    return Made(target, head, root / "train.jsonl", root / "held_out.jsonl")


def answers(
    engine: Engine, count: int, prompts: Sequence[Sequence[int]], temperature: float = 0.1
) -> list[FinishedRequest]:
    """Of one token and more; some end by themselves."""
    asked = [
        request(
            str(number),
            prompts[number % len(prompts)],
            1 + number * 7 % 24,
            temperature=temperature,
            seed=number,
            ignore_eos=False,
        )
        for number in range(count)
    ]
    done = serve(engine, *asked)
    return [done[str(number)] for number in range(count)]


def write(path: Path, done: Iterable[FinishedRequest]) -> None:
    lines = [
        {
            "segment": "a",
            "prompt_token_ids": list(one.request.prompt_token_ids),
            "output_token_ids": list(one.output_token_ids),
        }
        for one in done
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def engine_of(made: Made, head: Path) -> Engine:
    return Engine(EngineConfig(str(made.target), str(head), "eagle3", num_speculative_tokens=K, threads=1))


def served_as(one: FinishedRequest) -> ServedRequest:
    asked = one.request
    tokens = list(asked.prompt_token_ids), list(one.output_token_ids)
    return ServedRequest("a", *tokens, asked.params.temperature, K)


@pytest.mark.slow
def test_the_score_of_each_greedy_answer_is_what_the_engine_counts(made: Made) -> None:
    """Also of prompts of one token, whose first step has no drafts, and of answers of one token."""
    done = answers(engine_of(made, made.head), 40, KNOWN, 0.0)
    assert {len(one.request.prompt_token_ids) for one in done} == set(range(1, 7))
    assert {one.finish_reason for one in done} == {"stop", "length"}
    target = load_model(made.target, "target")
    scores = score_batch(target, load_draft(made.head, target), [served_as(one) for one in done])
    assert sum(one.counts.accepted for one in done) > 100
    for one, score in zip(done, scores, strict=True):
        found = score.rejection
        assert (found.steps, found.accepted_of_answer) == pytest.approx(
            (one.counts.steps, one.counts.accepted), abs=1e-6
        )
        # How many more tokens a request allowed behind an end is known to the engine alone.
        left = one.request.params.max_tokens - len(one.output_token_ids)
        if one.finish_reason == "length" or left >= K:
            assert found.drafted == pytest.approx(one.counts.drafted, abs=1e-6)


def test_a_score_by_the_first_place_of_a_chain_alone_would_not_be_what_the_engine_counts(made: Made) -> None:
    done = answers(engine_of(made, made.head), 40, KNOWN, 0.0)
    target = load_model(made.target, "target")
    wrong = score_batch(target, FirstPlaces(load_draft(made.head, target)), [served_as(one) for one in done])  # type: ignore[arg-type]
    apart = [
        abs(score.rejection.accepted_of_answer - one.counts.accepted)
        for one, score in zip(done, wrong, strict=True)
    ]
    assert sum(apart) > 10


class FirstPlaces:
    """The planted defect: what is drafted first stands for every place of a chain."""

    def __init__(self, draft: Draft) -> None:
        self._draft, self.features, self.tree = draft, draft.features, draft.tree

    def places(self, requests: Sequence[TrafficRequest], told: Told, _k: int) -> Iterator[list[torch.Tensor]]:
        return self._draft.places(requests, told, 1)


def distil(made: Made, output: Path, *more: str) -> int:
    return main(
        [
            *("distill", "--target", str(made.target), "--draft", str(made.head)),
            *("--train", str(made.train), "--output", str(output), "--threads", "1"),
            *("--steps", "40", "--batch-requests", "8", *more),
        ]
    )


def acceptance(made: Made, *heads: Path) -> list[float]:
    settings = EvaluateSettings(made.target, heads, made.held_out, K, 0.1)
    return [draft["segments"][0]["acceptance"] for draft in evaluate(settings)["drafts"]]  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_head_learns_captured_traffic_and_the_engine_serves_what_it_has_learned(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "candidate"
    capsys.readouterr()
    assert distil(made, output, "--loss", "forward-kl", "--learning-rate", "0.01", "--steps", "150") == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == ["progress"] * 15 + ["done"]
    before, after = acceptance(made, made.head, output)
    assert after > before + 0.05
    made_by = json.loads((output / "driftguard_training.json").read_text())
    assert made_by["version"] == events[-1]["version"] == model_version(output)
    assert (made_by["parent"], made_by["loss"], made_by["passes"]) == (
        model_version(made.head),
        "forward-kl",
        3,
    )
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=output, check=True)
    engine = engine_of(made, output)
    assert (engine.draft.method, engine.draft.version) == ("eagle3", made_by["version"])
    done = answers(engine, 300, MOVED)[200:]
    served = sum(one.counts.accepted for one in done) / sum(one.counts.drafted for one in done)
    assert served == pytest.approx(after, abs=0.05)


def test_the_same_seed_gives_the_same_bytes_and_what_is_not_trained_stays_as_it_is(
    made: Made, tmp_path: Path
) -> None:
    """A head with the target's output layer in its files, as speculators leaves it, and in bfloat16."""
    tensors = load_file(made.head / "model.safetensors")
    tensors["verifier_norm.weight"] = torch.rand(32)
    narrow = {name: each.bfloat16() if each.is_floating_point() else each for name, each in tensors.items()}
    parent = tmp_path / "parent"
    parent.mkdir()
    save_file(narrow, parent / "model.safetensors")
    config = json.loads((made.head / "config.json").read_text()) | {"speculators_config": {"kept": True}}
    (parent / "config.json").write_text(json.dumps(config))
    outputs = [tmp_path / name for name in ("a", "b", "other-seed")]
    for output, seed in zip(outputs, ("5", "5", "6"), strict=True):
        assert distil(made._replace(head=parent), output, "--steps", "3", "--seed", seed) == 0
    weights = [(output / "model.safetensors").read_bytes() for output in outputs]
    assert weights[0] == weights[1] != weights[2]
    assert (outputs[0] / "config.json").read_bytes() == (parent / "config.json").read_bytes()
    candidate = load_file(outputs[0] / "model.safetensors")
    assert {name: (each.dtype, each.shape) for name, each in candidate.items()} == {
        name: (each.dtype, each.shape) for name, each in narrow.items()
    }
    for name in ("verifier_norm.weight", "d2t", "t2d"):
        assert torch.equal(candidate[name], narrow[name])
    assert not torch.equal(candidate["fc.weight"], narrow["fc.weight"])


def test_a_head_without_an_output_layer_of_its_own_learns_to_draft_by_the_targets(
    made: Made, tmp_path: Path
) -> None:
    """All but an embedding of its own is trained, and nothing is added to its files."""
    head, candidate = tmp_path / "head", tmp_path / "candidate"
    save_random_head(head, load_target(made.target), range(257), (1,), embeds=True, unembeds=False)
    settings = ("--loss", "forward-kl", "--learning-rate", "0.01", "--steps", "100")
    assert distil(made._replace(head=head), candidate, *settings) == 0
    before, after = (load_file(one / "model.safetensors") for one in (head, candidate))
    assert before.keys() == after.keys()
    unchanged = {name for name, each in before.items() if torch.equal(each, after[name])}
    assert (unchanged, "lm_head.weight" in before) == ({"embed_tokens.weight"}, False)
    untrained, trained = acceptance(made, head, candidate)
    assert trained > untrained + 0.02
    done, target = answers(engine_of(made, candidate), 24, MOVED, 0.0), load_model(made.target, "target")
    scores = score_batch(target, load_draft(candidate, target), [served_as(one) for one in done])
    assert [one.counts.accepted for one in done] == pytest.approx(
        [score.rejection.accepted_of_answer for score in scores], abs=1e-6
    )


def test_answers_behind_the_positions_that_a_head_was_trained_on_are_scored_as_they_are_served(
    made: Made, tmp_path: Path
) -> None:
    head = tmp_path / "head"
    shutil.copytree(made.head, head)
    config = json.loads((head / "config.json").read_text())
    config["transformer_layer_config"]["max_position_embeddings"] = 8
    (head / "config.json").write_text(json.dumps(config))
    (head / "SHA256SUMS").unlink()
    done = answers(engine_of(made, head), 24, KNOWN, 0.0)
    target = load_model(made.target, "target")
    scores = score_batch(target, load_draft(head, target), [served_as(one) for one in done])
    assert [one.counts.accepted for one in done] == pytest.approx(
        [score.rejection.accepted_of_answer for score in scores], abs=1e-6
    )
    write(tmp_path / "long.jsonl", done)
    settings = EvaluateSettings(made.target, (head,), tmp_path / "long.jsonl", K, 0.0)
    assert evaluate(settings)["drafts"][0]["segments"][0]["steps"] > 0  # type: ignore[index]


def test_prompts_are_no_part_of_the_loss(made: Made) -> None:
    """What the target would have said in place of a prompt is nothing that is ever drafted: the mean over an
    answer behind a long prompt is that of its own tokens."""
    target = load_model(made.target, "target")
    draft = load_draft(made.head, target)
    one = ServedRequest("a", [*range(40, 60)], [7, 3, 250], 1.0, 3)
    _, accepted = draft.loss([one], "nla")
    told = read_answers(target.model, [one], draft.features)
    answer = DraftedAnswer(one, told.logits[0])
    for (logits,) in draft.places([one], told, 3):
        answer.add(logits)
    assert len(accepted) == 3 + 2 + 1
    assert accepted.mean().item() == pytest.approx(answer.kept("rejection"), rel=1e-2)


def test_what_does_not_fit_is_refused_by_name(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = Path(save(tmp_path / "wide", seed=3, hidden_size=48))
    capsys.readouterr()
    broken = tmp_path / "broken"
    broken.mkdir()
    tensors = load_file(made.head / "model.safetensors")
    del tensors["fc.weight"]
    save_file(tensors, broken / "model.safetensors")
    (broken / "config.json").write_bytes((made.head / "config.json").read_bytes())
    shapes = "embed_tokens.weight is missing, and the target's is of size 48, not 32"
    for one, problem in (
        (made._replace(target=wide), f"draft: the EAGLE-3 head in {made.head} cannot serve: {shapes}"),
        (
            made._replace(head=broken),
            f"draft: the EAGLE-3 head in {broken} cannot serve: fc.weight is missing",
        ),
    ):
        evaluated = ["evaluate", "--target", str(one.target), "--draft", str(one.head)]
        assert distil(one, tmp_path / "out") == 2
        assert capsys.readouterr().err == f"error: {problem}\n"
        assert main([*evaluated, "--traffic", str(one.held_out)]) == 2
        assert capsys.readouterr().err == f"error: {problem}\n"
    assert not (tmp_path / "out").exists()


def test_too_few_answers_that_can_be_drafted_are_refused(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a prompt and an answer of one token each a head drafts nothing."""
    line = json.dumps({"segment": "a", "prompt_token_ids": [5], "output_token_ids": [6]}) + "\n"
    train = tmp_path / "train.jsonl"
    enough = [text for text in made.train.read_text().splitlines(keepends=True) if len(text) > 150]
    train.write_text("".join(enough[:10]) + line * 200)
    assert distil(made._replace(train=train), tmp_path / "out") == 2
    assert capsys.readouterr().err.startswith(
        f"error: {train} has 10 requests; distillation needs at least 128"
    )
    settings = EvaluateSettings(made.target, (made.head,), train, K, 0.1)
    assert evaluate(settings)["drafts"][0]["segments"][0]["acceptance"] is not None  # type: ignore[index]

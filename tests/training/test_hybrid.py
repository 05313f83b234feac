"""Corpora beside a model are scored as the engine drafts with both."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from driftguard_engine.config import EngineConfig
from driftguard_engine.core import FinishedRequest, Request, SamplingParams
from driftguard_engine.engine import Engine
from driftguard_training.corpus import prompts
from driftguard_training.errors import BadModelDirectory, TooLittleTraffic
from driftguard_training.hybrid import evaluate_hybrid
from driftguard_training.lookup import make_corpus
from driftguard_training.settings import CorpusSettings, EvaluateHybridSettings, Verification

from driftguard.retraining.training.evaluation import told_of_answers
from tests.benchmarks.diagnosis.engine_figures import BUNDLED

LEAST = 3


def served(corpus: Path, temperature: float, verification: Verification) -> list[FinishedRequest]:
    engine = Engine(
        EngineConfig(
            str(BUNDLED / "target"),
            str(BUNDLED / "draft"),
            "hybrid",
            corpus=str(corpus),
            suffix_min_match=LEAST,
            threads=1,
            verification=verification,
        )
    )
    done: dict[str, FinishedRequest] = {}
    for number, text in enumerate(prompts("python", 10, 5, characters=120)):
        tokens = tuple(engine.tokenizer.encode(text, add_special_tokens=False))
        params = SamplingParams(max_tokens=32, temperature=temperature, seed=number)
        engine.submit(Request(str(number), tokens, params, datetime.now(UTC)))
    while engine.has_work():
        done |= {each.request_id: each.finished for each in engine.step() if each.finished is not None}
    return [done[str(number)] for number in range(len(done))]


def write(path: Path, requests: list[FinishedRequest]) -> Path:
    lines = [
        {
            "segment": "a",
            "prompt_token_ids": one.request.prompt_token_ids,
            "output_token_ids": one.output_token_ids,
        }
        for one in requests
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def evaluated(corpus: Path, traffic: Path, temperature: float, verification: Verification) -> Any:
    settings = EvaluateHybridSettings(
        BUNDLED / "target", BUNDLED / "draft", (corpus, None), traffic, LEAST, 4, temperature, verification
    )
    return evaluate_hybrid(settings)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of every second answer at temperature 0."""
    root = tmp_path_factory.mktemp("hybrid")
    other = write(root / "other.jsonl", served(_some_corpus(root), 0.0, "token")[::2])
    make_corpus(CorpusSettings(BUNDLED / "target", other, root / "corpus"))
    return root / "corpus"


def _some_corpus(root: Path) -> Path:
    root.mkdir(exist_ok=True)
    lines = [{"segment": "a", "prompt_token_ids": [1], "output_token_ids": list(range(9, 30))}]
    (root / "any.jsonl").write_text(json.dumps(lines[0]) + "\n")
    make_corpus(CorpusSettings(BUNDLED / "target", root / "any.jsonl", root / "any"))
    return root / "any"


def test_greedy_answers_are_accounted_for_token_by_token(corpus: Path, tmp_path: Path) -> None:
    finished = served(corpus, 0.0, "token")
    report = evaluated(corpus, write(tmp_path / "traffic.jsonl", finished), 0.0, "token")
    with_corpus, without = (draft["segments"][0] for draft in report["drafts"])
    assert with_corpus["accepted"] == pytest.approx([one.counts.accepted for one in finished])
    assert with_corpus["proposed"] == pytest.approx([one.counts.drafted for one in finished])
    assert with_corpus["steps"] == pytest.approx(sum(one.counts.steps for one in finished))
    assert sum(with_corpus["accepted"]) / with_corpus["steps"] > sum(without["accepted"]) / without["steps"]
    assert sum(with_corpus["kept"]) > sum(without["kept"])


def test_sampled_answers_are_accounted_for_on_average(corpus: Path, tmp_path: Path) -> None:
    finished = served(corpus, 0.7, "block")
    report = evaluated(corpus, write(tmp_path / "traffic.jsonl", finished), 0.7, "block")
    (segment,) = report["drafts"][0]["segments"]
    gaps = [one.counts.accepted - told for one, told in zip(finished, segment["accepted"], strict=True)]
    mean = sum(gaps) / len(gaps)
    error = (sum((gap - mean) ** 2 for gap in gaps) / (len(gaps) - 1) / len(gaps)) ** 0.5
    assert abs(mean) < 3 * error
    assert len(report["surprise"]) == len(finished)
    assert told_of_answers(report) is None


def test_answers_that_are_not_those_of_the_target_are_told(corpus: Path, tmp_path: Path) -> None:
    """As where its weights were replaced under the same name since they were captured."""
    traffic = tmp_path / "traffic.jsonl"
    line = {"segment": "a", "prompt_token_ids": [5, 6], "output_token_ids": list(range(9, 30))}
    traffic.write_text((json.dumps(line) + "\n") * 16)
    told = told_of_answers(evaluated(corpus, traffic, 0.7, "token"))
    assert "the captured answers are not those of this target at temperature 0.7" in (told or "")


def test_heads_that_guess_trees_are_refused_by_name(tmp_path: Path) -> None:
    traffic = tmp_path / "traffic.jsonl"
    line = {"segment": "a", "prompt_token_ids": [5, 6], "output_token_ids": [9, 10]}
    traffic.write_text(json.dumps(line) + "\n")
    settings = EvaluateHybridSettings(BUNDLED / "target", BUNDLED / "medusa", (None,), traffic, LEAST)
    with pytest.raises(BadModelDirectory, match=r"draft: .*medusa guesses trees"):
        evaluate_hybrid(settings)


def test_an_answer_longer_than_the_context_of_the_model_is_left_out(tmp_path: Path) -> None:
    line = {"segment": "a", "prompt_token_ids": [5, 6], "output_token_ids": [9, 10, 11, 12]}
    long = {"segment": "a", "prompt_token_ids": [5] * 2000, "output_token_ids": [9]}
    reports = []
    for lines in ([line, line], [long, line, long, line]):
        traffic = tmp_path / "traffic.jsonl"
        traffic.write_text("".join(json.dumps(one) + "\n" for one in lines))
        reports.append(evaluated(_some_corpus(tmp_path / f"{len(lines)}"), traffic, 1.0, "token"))
    without, found = reports
    for draft, expected in zip(found["drafts"], without["drafts"], strict=True):
        assert draft["segments"] == expected["segments"]
    assert (without["left_out"], found["left_out"]) == ({}, {"a": 2})
    traffic.write_text(json.dumps(long) + "\n")
    with pytest.raises(TooLittleTraffic, match=r"no request fits the models' context of \d+ tokens"):
        evaluated(_some_corpus(tmp_path / "none"), traffic, 1.0, "token")

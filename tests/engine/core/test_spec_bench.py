"""Spec-Bench's questions on this engine: its format, and that nothing but speed depends on the draft."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from driftguard_engine.options import BUNDLED
from driftguard_engine.spec_bench import BadQuestions, app, read_questions
from transformers import AutoTokenizer

from tests.forked import forked

QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["def a():", "Once more."]},
    {"question_id": 82, "category": "coding", "turns": ["import os\n"], "reference": ["x"]},
    {"question_id": 9, "category": "translation", "turns": ["Der Hund " * 300]},
]


def run(directory: Path, *arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command as a process."""
    log = directory / "log"
    with forked(main, [*map(str, arguments), "--threads", "1"], log) as process:
        printed = process.stdout.read()
        return process.wait(60), printed, log.read_text()


def main(arguments: Sequence[str]) -> None:
    app(list(arguments))


def questions(path: Path, *told: object) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in told))
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["draft_model", "eagle3", "medusa", "suffix", "ssd"])
def test_answers_are_those_without_speculation_in_the_format_that_speed_py_reads(
    tmp_path: Path, method: str
) -> None:
    asked = questions(tmp_path / "question.jsonl", *QUESTIONS)
    files = tmp_path / "fast.jsonl", tmp_path / "slow.jsonl"
    code, printed, error = run(
        tmp_path,
        *(asked, "--method", method, "--output", files[0], "--baseline-output", files[1]),
        *("--max-new-tokens", 24, "--max-length", 256),
    )
    assert code == 0, error
    fast, slow = map(lines, files)
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "target")
    for question, with_drafts, without in zip(QUESTIONS, fast, slow, strict=True):
        assert with_drafts["question_id"] == question["question_id"] == without["question_id"]
        assert with_drafts["category"] == question["category"]
        assert with_drafts["model_id"] == f"target-{method}"
        (one,), (other,) = with_drafts["choices"], without["choices"]
        assert one["turns"] == other["turns"]
        assert one["new_tokens"] == other["new_tokens"] == other["decoding_steps"]
        assert sum(one["accept_lengths"]) == sum(one["new_tokens"])
        assert len(one["accept_lengths"]) == sum(one["decoding_steps"])
        assert len(one["wall_time"]) == len(question["turns"])  # type: ignore[arg-type]
        assert min(one["wall_time"]) > 0
        assert all(
            len(tokenizer(text).input_ids) <= count
            for text, count in zip(one["turns"], one["new_tokens"], strict=True)
        )
    rows = {row.split()[0]: row.split() for row in printed.splitlines()}
    assert (rows["mt_bench"][1], rows["translation"][1], rows["overall"][1]) == ("2", "1", "3")
    assert (rows["mt_bench"][-1], rows["translation"][-1]) == ("0", "1")  # prompts that were cut
    lengths = [length for line in fast for length in line["choices"][0]["accept_lengths"]]
    assert rows["overall"][2] == f"{sum(lengths) / len(lengths):.2f}"
    assert ("drafted ahead: of" in printed) is (method == "ssd")


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"question_id": 1, "category": "qa"}, "line 2: no question of Spec-Bench (KeyError('turns'))"),
        ([], "line 2: no question of Spec-Bench"),
        ({"question_id": 1, "category": "qa", "turns": []}, "line 2: turns is empty"),
    ],
)
def test_a_file_that_is_none_is_refused_by_its_line(tmp_path: Path, told: object, reason: str) -> None:
    asked = questions(tmp_path / "question.jsonl", QUESTIONS[0], told)
    with pytest.raises(BadQuestions) as refused:
        read_questions(asked)
    assert reason in str(refused.value)


def test_a_file_that_is_none_ends_with_its_error_and_writes_nothing(tmp_path: Path) -> None:
    asked = questions(tmp_path / "question.jsonl", [])
    code, printed, error = run(tmp_path, asked, "--output", tmp_path / "out.jsonl")
    assert (code, printed) == (2, "")
    assert "line 1: no question of Spec-Bench" in error
    assert not (tmp_path / "out.jsonl").exists()

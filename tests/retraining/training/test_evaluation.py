"""Measurements become the gate's groups and costs; equal architectures cost the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from driftguard.retraining.training.evaluation import read_measurements, told_of_answers
from driftguard.retraining.training.gate import DraftScores
from driftguard.retraining.training.process import TrainingFailed


def measured(root: Path, *hidden_sizes: int) -> dict[str, Any]:
    drafts = []
    for number, hidden_size in enumerate(hidden_sizes):
        directory = root / f"draft-{number}"
        directory.mkdir()
        config = {"hidden_size": hidden_size, "transformers_version": f"5.{number}"}
        (directory / "config.json").write_text(json.dumps(config))
        segments = [
            {
                "segment": name,
                "requests": 2,
                "positions": 20,
                "acceptance": 0.5,
                "steps": 10.0 - number,
                "kept": [0.4 + number / 10, 0.6],
                "drafted": [20.0, 18.0],
                "accepted": [5.0, 4.0 + number],
            }
            for name in ("changed:german", "older:code")
        ]
        drafts.append(
            {
                "directory": str(directory),
                "seconds_per_draft_token": 0.001 + number / 1000,
                "segments": segments,
            }
        )
    return {
        "num_speculative_tokens": 4,
        "temperature": 1.0,
        "seconds_per_target_step": 0.01,
        "drafts": drafts,
    }


def test_groups_are_paired_and_marked(tmp_path: Path) -> None:
    groups, costs = read_measurements(measured(tmp_path, 16, 32))
    changed, older = groups
    assert (changed.group, changed.changed, older.changed) == ("changed:german", True, False)
    assert changed.parent == DraftScores([0.4, 0.6], [20.0, 18.0], [5.0, 4.0], 10.0)
    assert changed.candidate == DraftScores([0.5, 0.6], [20.0, 18.0], [5.0, 5.0], 9.0)
    assert (costs.parent_seconds_per_draft_token, costs.candidate_seconds_per_draft_token) == (0.001, 0.002)


def test_noise_between_equal_architectures_is_shared(tmp_path: Path) -> None:
    _, costs = read_measurements(measured(tmp_path, 16, 16))
    assert costs.parent_seconds_per_draft_token == costs.candidate_seconds_per_draft_token == 0.0015


@pytest.mark.parametrize("drafts", [1, 3])
def test_anything_but_two_drafts_is_refused(tmp_path: Path, drafts: int) -> None:
    with pytest.raises(TrainingFailed, match="cannot be read"):
        read_measurements(measured(tmp_path, *[16] * drafts))


@pytest.mark.parametrize(
    ("surprise", "is_told"),
    [
        ([0.9, 1.4] * 10, True),
        ([0.9, 1.4] * 4, False),  # too few to tell
        ([-0.3, 0.35] * 10, False),  # its own
        ([0.0] * 13 + [1.2] * 7, False),  # its own, a part of them at another temperature than most
        ([-3.0, 3.4] * 10, False),  # may be chance
    ],
)
def test_answers_of_another_target_are_told(surprise: list[float], is_told: bool) -> None:
    told = told_of_answers({"temperature": 0.0, "surprise": surprise})
    assert (told is not None) == is_told
    if told is not None:
        assert "at temperature 0: they surprise it by 1.15 nats per token more" in told


def test_measurements_without_surprise_tell_nothing_of_the_answers(tmp_path: Path) -> None:
    """As of corpora, which are judged without the target."""
    assert told_of_answers(measured(tmp_path, 16, 16)) is None

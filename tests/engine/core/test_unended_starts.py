"""A server that ends again and again with the draft in its state directory."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from driftguard_engine.drafters import state_file, unended_starts
from driftguard_engine.drafters.state_file import SavedDraft, save_draft, saved_version

NOW = 1_800_000_000.0
MINUTE = 60.0


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    save(tmp_path, "v2")
    return tmp_path


def save(state_dir: Path, version: str) -> None:
    save_draft(state_dir, SavedDraft("configured", "/drafts/new", version))


def starts(state_dir: Path, *minutes: float) -> list[str | None]:
    return [unended_starts.begin(state_dir, NOW + each * MINUTE) for each in minutes]


def test_the_fourth_start_within_an_hour_gives_the_draft_up(
    state_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        assert starts(state_dir, 0, 19, 38) == [None, None, None]
        assert caplog.messages == []
        assert starts(state_dir, 57) == ["v2"]
    (told,) = caplog.messages
    assert "started 3 times within an hour with draft v2" in told
    assert "serving the configured draft" in told
    assert saved_version(state_dir) is None
    assert starts(state_dir, 58, 59) == [None, None]


def test_one_that_is_put_into_service_again_has_no_three_further_starts(state_dir: Path) -> None:
    starts(state_dir, 0, 5, 10, 15)
    save(state_dir, "v2")
    assert starts(state_dir, 20) == ["v2"]
    save(state_dir, "v2")
    assert starts(state_dir, 120) == [None]


def test_other_drafts_begin_anew(state_dir: Path) -> None:
    starts(state_dir, 0, 5, 10)
    save(state_dir, "v3")
    assert starts(state_dir, 15, 16, 17, 18) == [None, None, None, "v3"]


def test_ends_on_request_and_starts_that_are_hours_apart_are_ordinary(state_dir: Path) -> None:
    for each in range(10):
        assert starts(state_dir, each) == [None]
        unended_starts.end(state_dir)
    assert starts(state_dir, *range(100, 500, 30)) == [None] * 14
    assert saved_version(state_dir) == "v2"


def test_a_clock_that_was_ahead_does_no_harm(state_dir: Path) -> None:
    starts(state_dir, 10_000, 10_001, 10_002)
    assert starts(state_dir, 0) == [None]


@pytest.mark.parametrize("content", ["", "{half", "[]", '{"version": "v2", "starts": 3}'])
def test_half_a_file_counts_nothing(state_dir: Path, content: str) -> None:
    (state_dir / unended_starts.FILE_NAME).write_text(content)
    assert starts(state_dir, 0, 1, 2, 3) == [None, None, None, "v2"]


def test_without_a_saved_draft_nothing_is_written(tmp_path: Path) -> None:
    assert starts(tmp_path, 0, 1, 2, 3) == [None] * 4
    assert [*tmp_path.iterdir()] == []
    (tmp_path / state_file.FILE_NAME).write_text("{half")
    assert starts(tmp_path, 0, 1, 2, 3) == [None] * 4

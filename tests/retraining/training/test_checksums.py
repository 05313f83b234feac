"""SHA256SUMS of a draft: what is found when its files, or the list itself, were changed."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from driftguard.retraining.training.checksums import DraftChanged, digest_of_list, verify


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    contents = {"config.json": b"{}", "model.safetensors": b"weights"}
    lines = []
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        lines.append(f"{hashlib.sha256(content).hexdigest()}  {name}\n")
    (tmp_path / "SHA256SUMS").write_text("".join(lines))
    return tmp_path


def test_what_was_made_is_as_it_was_made(draft: Path) -> None:
    verify(draft, digest_of_list(draft))
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=draft, check=True)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_changed_and_a_missing_file_are_named(draft: Path, name: str) -> None:
    (draft / name).write_bytes(b"other")
    with pytest.raises(DraftChanged, match=rf"{name} is not as the training wrote it"):
        verify(draft)
    (draft / name).unlink()
    with pytest.raises(DraftChanged, match=rf"{name} cannot be read"):
        verify(draft)


def test_a_file_that_is_changed_with_its_line_is_found_by_the_digest_of_the_list(draft: Path) -> None:
    made = digest_of_list(draft)
    (draft / "config.json").write_bytes(b"other")
    lines = (draft / "SHA256SUMS").read_text().splitlines()
    lines[0] = f"{hashlib.sha256(b'other').hexdigest()}  config.json"
    (draft / "SHA256SUMS").write_text("\n".join(lines) + "\n")
    verify(draft)
    with pytest.raises(DraftChanged, match="is not the list that the training wrote"):
        verify(draft, made)


@pytest.mark.parametrize(
    "content",
    [b"", b"nonsense\n", b"0" * 64 + b"  ../model.safetensors\n", b"0" * 64 + b"  config.json\n", b"\xff"],
)
def test_what_is_no_list_of_a_models_files_is_refused(draft: Path, content: bytes) -> None:
    (draft / "SHA256SUMS").write_bytes(content)
    with pytest.raises(DraftChanged, match="SHA256SUMS"):
        verify(draft)

"""The README is short and leads to every guide; what docs/record.md says to type works on a real sidecar."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx
import pytest

from driftguard.store.database import Database
from tests.pipeline.sidecar import running_sidecar

ROOT: Final = Path(__file__).parents[2]
README: Final = (ROOT / "README.md").read_text(encoding="utf-8")
RECORD: Final = (ROOT / "docs" / "record.md").read_text(encoding="utf-8")
MOST_LINES, LONGEST_LINE = 150, 160  # two screens


@pytest.fixture
def client(database: Database, tmp_path: Path) -> Iterator[httpx.Client]:
    with running_sidecar(database, tmp_path) as client:
        yield client


def example(language: str, holding: str, client: httpx.Client) -> str:
    """The code block that holds these words, with the address of the test's sidecar."""
    blocks: list[str] = re.findall(rf"```{language}\n(.*?)```", RECORD, re.DOTALL)
    (block,) = (block for block in blocks if holding in block)
    assert "http://127.0.0.1:8200" in block
    return block.replace("http://127.0.0.1:8200", str(client.base_url).rstrip("/"))


def test_the_curl_lines_send_a_record_and_export_it(client: httpx.Client, tmp_path: Path) -> None:
    send = example("sh", "curl -X POST", client)
    answer = subprocess.run(["bash", "-euc", send], capture_output=True, check=True, text=True, timeout=60)
    assert answer.stdout == '{"accepted":1,"duplicates":0}'
    export = example("sh", "format=jsonl", client)
    subprocess.run(["bash", "-euc", export], cwd=tmp_path, capture_output=True, check=True, timeout=60)
    again = client.post("/api/v1/records", content=(tmp_path / "records.jsonl").read_bytes())
    assert again.json() == {"accepted": 0, "duplicates": 1}


def test_the_python_lines_send_a_record(client: httpx.Client) -> None:
    exec(compile(example("python", "driftguard.client", client), "record.md", "exec"), {})
    (record,) = client.get("/api/v1/records").json()["records"]
    assert (record["segment"], record["drafted"], record["accepted"]) == ("support-de", 200, 148)


def test_the_readme_fits_on_two_screens() -> None:
    lines = README.splitlines()
    assert len(lines) <= MOST_LINES
    assert [line for line in lines if len(line) > LONGEST_LINE] == []


def test_every_guide_is_at_most_two_links_from_the_readme() -> None:
    """Linked by the README itself, or by the index docs/README.md, which the README links."""
    direct = set(re.findall(r"\]\(docs/([\w-]+\.md)[#)]", README))
    assert "README.md" in direct
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    reached = direct | set(re.findall(r"\]\(([\w-]+\.md)[#)]", index))
    assert {guide.name for guide in (ROOT / "docs").glob("*.md")} - reached == set()

"""The README is short, and what the page about records says to type does what it says, on a real sidecar."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from driftguard.store.database import Database
from tests.pipeline.sidecar import running_sidecar

ROOT = Path(__file__).parents[2]
RECORD = (ROOT / "docs" / "record.md").read_text(encoding="utf-8")


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


def test_the_readme_is_two_screens() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


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

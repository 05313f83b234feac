"""Every deployment stores the key of its Secret at each start, also where that is another one now."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from driftguard.cli.main import app
from driftguard.store.database import Database
from driftguard.store.keys import is_valid, list_keys, revoke_key
from tests.deploy.committed import DEPLOY, KUBERNETES, ROOT

FILES = (
    ROOT / "docker-compose.yml",
    KUBERNETES / "base" / "deployment.yaml",
    KUBERNETES / "vllm" / "vllm.yaml",
    DEPLOY / "helm" / "driftguard" / "templates" / "deployment.yaml",
)
OLD, NEW, NEWEST = "o" * 64, "n" * 64, "w" * 64


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_start_with_another_key_in_the_secret_stores_it_too(
    file: Path, database: Database, database_url: str
) -> None:
    """An init container that failed here would keep the sidecar from starting for good."""
    (command,) = re.findall(r"driftguard (keys add [^&|;\]\n]*)", file.read_text(encoding="utf-8"))

    def start(key: str) -> None:
        variables = {"DRIFTGUARD_DATABASE_URL": database_url, "DRIFTGUARD_API_KEY": key}
        result = CliRunner().invoke(app, command.split(), env=variables)
        assert (result.exit_code, result.exception) == (0, None), result.exception

    for key in (OLD, OLD, NEW, NEW, OLD, NEWEST):
        start(key)
    with database.session() as session:
        assert all(is_valid(session, key) for key in (OLD, NEW, NEWEST))
        first, second, third = [key.name for key in list_keys(session)]
        assert (second, third) == (f"{first}-2", f"{first}-3")
        revoke_key(session, first)  # once every sender has the new one
    start(NEWEST)
    with database.session() as session:
        assert [is_valid(session, key) for key in (OLD, NEW, NEWEST)] == [False, True, True]

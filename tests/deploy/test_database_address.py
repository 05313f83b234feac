"""Commands of the guides that name the address of a database keep it whole, whatever options it gets."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.deploy.committed import DEPLOY, KUBERNETES, ROOT

FILES = (
    ROOT / "docs" / "production.md",
    KUBERNETES / "base" / "kustomization.yaml",
    DEPLOY / "helm" / "driftguard" / "values.yaml",
)
OPTIONS = "?sslmode=verify-full&sslrootcert=/etc/ssl/company/ca.crt"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_an_address_with_options_passes_the_shell(file: Path) -> None:
    """Behind an & that is not quoted a shell begins another command."""
    words = re.findall(
        r"(\S*(?:database-url|DATABASE_URL)='?(?:postgresql://|\.\.\.)\S*)", file.read_text("utf-8")
    )
    assert words
    for word in words:
        with_options = re.sub(r"(\.\.\.|/driftguard)", rf"\g<1>{OPTIONS}", word)
        told = subprocess.run(
            ["sh", "-c", f"printf '%s\\n' {with_options}"], capture_output=True, text=True, check=False
        )
        assert told.stdout.rstrip("\n").endswith(OPTIONS), word

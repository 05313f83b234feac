"""The sidecar, its client and the proxy on the oldest releases that pyproject.toml allows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.deploy.committed import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.version_info >= (3, 12), reason="some have no wheels for newer Pythons"),
]

EXTRAS = ("proxy", "otlp", "parquet")
TESTS = (  # of what was broken with older ones, and of what an operator needs first
    "api/test_exports.py",
    "api/test_ingest.py",
    "api/otlp/test_spans.py",
    "client/test_client.py",
    "proxy/test_malformed.py",
    "status/test_gauges.py",
    "store/test_silent_holders.py",
)


def oldest() -> list[str]:
    """As pip takes them: `fastapi==0.150`."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*declared["dependencies"]]
    asked += [each for extra in EXTRAS for each in declared["optional-dependencies"][extra]]
    return [re.sub(r">=([0-9.]+).*", r"==\1", each) for each in asked]


def test_what_serves_records_reports_and_refuses_does_so(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", str(packages)]
    subprocess.run([*install, *oldest()], check=True, capture_output=True)
    tests = [str(ROOT / "tests" / each) for each in TESTS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-m", "not slow", *tests],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(packages), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]

"""The sidecar, its client and the proxy on the oldest releases that are allowed, and beside vLLM."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.deploy.committed import PROJECT, ROOT

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
# The newest that the metadata of vLLM 0.32.0 allows, which has no other upper bounds of what is needed here.
VLLM_TAKES = {"fastapi": "0.136.3"}


def declared() -> list[str]:
    extras = [each for extra in EXTRAS for each in PROJECT["optional-dependencies"][extra]]
    return [*PROJECT["dependencies"], *extras]


def test_the_plugin_can_be_installed_into_the_environment_of_vllm() -> None:
    allowed = {each.name: each.specifier for each in map(Requirement, declared())}
    assert [name for name, version in VLLM_TAKES.items() if version not in allowed[name]] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="some have no wheels for newer Pythons")
def test_what_serves_records_reports_and_refuses_does_so(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    oldest = [re.sub(r">=([0-9.]+).*", r"==\1", each) for each in declared()]
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", str(packages)]
    subprocess.run([*install, *oldest], check=True, capture_output=True)
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

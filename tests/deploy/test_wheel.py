"""The wheel alone, beside the dependencies but without the checkout: does it bring all it needs?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import httpx
import pytest

from driftguard.demo.processes import free_port
from tests.alerting.http_receiver import wait_until
from tests.alerts.committed import COMMITTED
from tests.deploy.committed import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel."""
    directory = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(directory)]
    subprocess.run(build, check=True, capture_output=True, cwd=ROOT)
    (wheel,) = directory.glob("driftguard_llm-*.whl")
    with ZipFile(wheel) as file:
        file.extractall(directory / "installed")
    return directory / "installed"


def driftguard(installed: Path, *arguments: str, **variables: str) -> dict[str, Any]:
    """What subprocess needs to run the command. Its dependencies are those of the tests, found over
    PYTHONPATH, where the editable install is not (that takes a .pth file)."""
    path = f"{installed}:{Path(httpx.__file__).parents[1]}"
    return {
        "args": [sys.executable, "-P", "-S", "-m", "driftguard", *arguments],
        "env": {**os.environ, "PYTHONPATH": path, **variables},
        "stdout": subprocess.PIPE,
        "text": True,
    }


def is_ready(port: str) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz").is_success
    except httpx.TransportError:
        return False


@pytest.fixture
def sidecar(installed: Path, tmp_path: Path) -> Iterator[httpx.Client]:
    """With the embedded database, whose tables the wheel's migrations make."""
    port, data = str(free_port()), str(tmp_path / "data")
    process = subprocess.Popen(**driftguard(installed, "serve", "--port", port, "--data-dir", data))
    try:
        wait_until(lambda: process.poll() is not None or is_ready(port), "the sidecar to be ready")
        add = driftguard(
            installed, "keys", "add", "test", DRIFTGUARD_DATA_DIR=data, DRIFTGUARD_API_KEY="0123456789" * 4
        )
        assert subprocess.run(**add, check=True).stdout == "test: stored\n"
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            yield client
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_the_wheel_brings_its_pages_runbooks_and_migrations(sidecar: httpx.Client) -> None:
    assert "<title>" in sidecar.get("/").text
    for file in (ROOT / "driftguard" / "api" / "pages" / "static").iterdir():
        assert sidecar.get(f"/static/{file.name}").content == file.read_bytes()
    assert "Leon Sorokin" in sidecar.get("/static/uPlot.js").text[:200]
    assert "Permission is hereby granted" in sidecar.get("/static/uPlot.LICENSE.txt").text
    for file in (ROOT / "alerts" / "runbooks").iterdir():
        assert sidecar.get(f"/runbooks/{file.name}").text == file.read_text(encoding="utf-8")
        assert sidecar.get(f"/runbooks/{file.stem}").status_code == 200
    described = json.loads((ROOT / "docs" / "openapi.json").read_text(encoding="utf-8"))
    assert sidecar.get("/api/v1/openapi.json").json() == described


@pytest.mark.parametrize(
    ("directory", "one"), [("bundled", "draft/model.safetensors"), ("kernels/csrc", "verify.cu")]
)
def test_the_wheel_brings_what_the_engine_reads(installed: Path, directory: str, one: str) -> None:
    wanted = ROOT / "engine" / "driftguard_engine" / directory
    brought = installed / "driftguard_engine" / directory
    committed = {file.relative_to(wanted) for file in wanted.rglob("*") if file.is_file()}
    assert {file.relative_to(brought) for file in brought.rglob("*") if file.is_file()} == committed
    assert Path(one) in committed


@pytest.mark.parametrize(
    "package", ["driftguard", "driftguard_http", "driftguard_engine", "driftguard_training"]
)
def test_every_package_lies_where_it_is_imported_and_is_typed(installed: Path, package: str) -> None:
    assert (installed / package / "__init__.py").is_file()
    assert (installed / package / "py.typed").is_file()


def test_the_wheel_generates_the_alert_rules(installed: Path, tmp_path: Path) -> None:
    command = driftguard(installed, "alert-rules", "--grafana-url", str(COMMITTED.grafana_url))
    rules = subprocess.run(**command, check=True, cwd=tmp_path).stdout
    assert rules == (ROOT / "alerts" / "driftguard-rules.yaml").read_text(encoding="utf-8")


def test_the_command_is_the_wheels(installed: Path, tmp_path: Path) -> None:
    """Not the checkout's, beside which it would find what the wheel has to bring."""
    asked = driftguard(installed)
    asked["args"] = [sys.executable, "-P", "-S", "-c", "import driftguard; print(driftguard.__file__)"]
    assert Path(subprocess.run(**asked, check=True, cwd=tmp_path).stdout.strip()).is_relative_to(installed)

"""The engine on the oldest release of transformers that pyproject.toml allows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.deploy.committed import ROOT
from tests.engine.core.tiny import save

pytestmark = pytest.mark.slow

SERVES = """
import importlib, json, pkgutil, sys
import driftguard_engine, driftguard_training, transformers

names = [
    module.name
    for package in (driftguard_engine, driftguard_training)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    if not module.name.endswith("__main__")
]
for name in names:
    importlib.import_module(name)
from driftguard_engine.config import EngineConfig
from driftguard_engine.engine import Engine
from tests.engine.core.tiny import request, tokens

engine = Engine(EngineConfig(sys.argv[1], sys.argv[2]))
asked = request("greedy", max_tokens=20), request("drawn", max_tokens=20, temperature=1.0, seed=3)
found = tokens(engine, *asked)
print(json.dumps([transformers.__version__, len(names), found]))
"""


def oldest() -> str:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (asked,) = (
        each for each in declared["optional-dependencies"]["engine"] if each.startswith("transformers")
    )
    version: str = asked.removeprefix("transformers>=")
    return version


def served(target: Path, draft: Path, *before: str) -> list[object]:
    paths = os.pathsep.join([*before, str(ROOT), *map(str, (ROOT / "engine", ROOT / "engine" / "training"))])
    command = [sys.executable, "-c", SERVES, str(target), str(draft)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_module_is_imported_and_requests_get_the_same(tmp_path: Path) -> None:
    version, packages = oldest(), tmp_path / "packages"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(packages)]
    subprocess.run([*install, f"transformers=={version}.*"], check=True, capture_output=True)
    target, draft = (
        Path(save(tmp_path / name, seed=3, noise=noise)) for name, noise in (("target", 0.0), ("draft", 0.03))
    )
    found, now = served(target, draft, str(packages)), served(target, draft)
    assert str(found[0]).startswith(f"{version}.")
    assert found[1:] == now[1:]

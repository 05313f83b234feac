"""The engine on the oldest release of transformers that pyproject.toml allows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
from driftguard_engine.config import EngineConfig
from driftguard_engine.engine import Engine

from tests.deploy.committed import PROJECT, ROOT
from tests.engine.core.tiny import request, save, tokens

pytestmark = pytest.mark.slow

PINNED_BY_IT = ("huggingface-hub", "tokenizers")  # by transformers: a newer one does not serve it
SERVES = """
import importlib, json, pkgutil, sys
import driftguard_engine, driftguard_training, transformers

for package in (driftguard_engine, driftguard_training):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
from tests.deploy.test_oldest_transformers import served

print(json.dumps([transformers.__version__, served(*sys.argv[1:])]))
"""


def oldest() -> str:
    (asked,) = (
        each for each in PROJECT["optional-dependencies"]["engine"] if each.startswith("transformers")
    )
    version: str = asked.removeprefix("transformers>=")
    return version


def install(packages: Path, *asked: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    subprocess.run([*command, "--target", str(packages), *asked], check=True, capture_output=True)


def served(target: str, draft: str) -> dict[str, list[int]]:
    engine = Engine(EngineConfig(target, draft))
    asked = request("greedy", max_tokens=20), request("drawn", max_tokens=20, temperature=1.0, seed=3)
    return {name: [*output] for name, output in tokens(engine, *asked).items()}


def test_every_module_is_imported_and_requests_get_the_same(tmp_path: Path) -> None:
    version, packages = oldest(), tmp_path / "packages"
    install(packages, f"transformers=={version}.*")
    (transformers,) = distributions(path=[str(packages)])
    needs = [each for each in transformers.requires or [] if "extra ==" not in each]
    install(packages, *(each for each in needs if each.startswith(PINNED_BY_IT)))
    models = [
        save(tmp_path / name, seed=3, noise=noise) for name, noise in (("target", 0.0), ("draft", 0.03))
    ]
    paths = os.pathsep.join(map(str, (packages, ROOT, ROOT / "engine", ROOT / "engine" / "training")))
    command = [sys.executable, "-c", SERVES, *map(str, models)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found, outputs = json.loads(done.stdout.splitlines()[-1])
    assert found.startswith(f"{version}.")
    assert outputs == served(*map(str, models))

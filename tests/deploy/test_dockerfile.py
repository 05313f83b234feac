"""The Dockerfile: what it copies is there, what it starts is a command, and what it leaves out stays out."""

from __future__ import annotations

import ast
import json
import py_compile
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from dockerfile_parse import DockerfileParser

from deploy.image import slim
from driftguard.settings.loading import load_settings
from tests.deploy.committed import ROOT, parse_command, set_environment

IGNORED = [
    line
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]


def stages() -> dict[str, list[tuple[str, str]]]:
    """Name of a stage -> its instructions, with those of the stages that it begins from."""
    parsed: list[dict[str, Any]] = DockerfileParser(path=str(ROOT / "Dockerfile")).structure
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for item in parsed:
        instruction, value = item["instruction"], item["value"]
        if instruction == "FROM":
            base, _, name = value.partition(" AS ")
            found[name] = list(found.get(base, [("FROM", base)]))
        elif instruction not in ("COMMENT", "ARG"):
            found[name].append((instruction, value))
    return found


STAGES = stages()
IMAGES = ("sidecar", "engine")
CACHES = "PYTHONPYCACHEPREFIX=/opt/driftguard/pycache"  # beside the environment: copied with it


def last(stage: str, instruction: str) -> str:
    return [value for name, value in STAGES[stage] if name == instruction][-1]


def sources() -> list[str]:
    copies = [value for name, value in STAGES["wheel"] if name == "COPY"]
    return [source for copy in copies for source in copy.split()[:-1]]


def test_what_is_copied_is_there_and_is_sent_to_the_builder() -> None:
    assert IGNORED[0] == "*"
    allowed = {line.removeprefix("!") for line in IGNORED if line.startswith("!")}
    assert set(sources()) == allowed
    assert all((ROOT / source).exists() for source in allowed)
    assert not any(fnmatch(source, line) for source in allowed for line in IGNORED[1:] if line[0] != "!")


def test_all_that_the_wheel_is_made_of_is_copied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {*wheel["only-include"], *wheel["force-include"], project["project"]["readme"], "pyproject.toml"}
    needed |= set(project["project"]["license-files"])
    assert not {path for path in needed if not any(Path(path).is_relative_to(source) for source in sources())}


def test_every_base_names_its_version() -> None:
    bases = {instructions[0][1] for instructions in STAGES.values()}
    assert bases == {"python:3.12-slim-bookworm", "scratch"}


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_a_command_without_root_and_says_whether_it_is_healthy(image: str) -> None:
    assert last(image, "USER") == "10001:10001"
    entry = json.loads(last(image, "ENTRYPOINT"))
    command = json.loads(last(image, "CMD"))
    assert entry == ["driftguard"]
    parse_command(command)
    port = last(image, "EXPOSE")
    (asked,) = re.findall(r"http://127\.0\.0\.1:(\d+)/(?:healthz|health)'", last(image, "HEALTHCHECK"))
    assert asked == port == {"sidecar": "8200", "engine": "8100"}[image]
    assert last(image, "VOLUME") in last(image, "ENV")


def test_the_sidecar_is_the_default_and_has_no_torch() -> None:
    assert list(STAGES)[-1] == "sidecar"
    assert "[proxy,otlp]" in last("sidecar-packages", "RUN")
    assert "[proxy,otlp,engine,cuda]" in last("engine-packages", "RUN")


def test_the_environment_of_the_images_is_taken_as_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown DRIFTGUARD_ variable is refused at start."""
    set_environment(monkeypatch, dict(re.findall(r"(DRIFTGUARD_\w+)=(\S+)", last("sidecar", "ENV"))))
    assert load_settings().data_directory == Path("/var/lib/driftguard")


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_is_made_of_one_environment_without_pip_that_was_slimmed(image: str) -> None:
    assert "-m venv --without-pip /opt/driftguard" in last("wheel", "RUN")
    copied = [value for name, value in STAGES[image] if name == "COPY"]
    assert copied == ["--from=lean / /", f"--from={image}-packages /opt/driftguard /opt/driftguard"]
    assert last(f"{image}-packages", "RUN").endswith(f"{CACHES} /opt/driftguard/bin/python -B /slim.py")
    assert CACHES in last(image, "ENV")


def test_of_scipy_an_image_keeps_what_is_imported() -> None:
    """Here rather than when the image is built. The demo cannot run there: it needs an embedded database."""
    used = set()
    for file in (ROOT / "driftguard").rglob("*.py"):
        if not file.is_relative_to(ROOT / "driftguard" / "demo"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "scipy":
                    _, _, inner = str(node.module).partition(".")
                    used |= {inner.split(".")[0]} if inner else {alias.name for alias in node.names}
                elif isinstance(node, ast.Import):
                    used |= {name.name.split(".")[1] for name in node.names if name.name.startswith("scipy.")}
    assert used
    assert used <= slim.SCIPY_KEPT


def test_slimming_leaves_what_it_does_not_name(tmp_path: Path) -> None:
    kept = ["numpy/a.py", "numpy/testing/a.py", "scipy/special/a.so", "torch/tests/a.py", "torch/include/a.h"]
    kept += ["pygments/a.py", "pygments/lexers/python.py"]
    gone = [
        "pygments/lexers/a.py",
        "numpy/tests/a.py",
        "numpy/a.pyi",
        "scipy/signal/a.py",
        "scipy/special/tests/a.py",
        "scipy/special/a.pxd",
    ]
    for name in kept + gone:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    slim.trim(tmp_path)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")) == sorted(kept)


def test_beside_torch_all_that_is_compiled_has_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.ops and torch.classes have none."""
    import torch

    compiled: list[str] = []
    monkeypatch.setattr(py_compile, "compile", lambda file, doraise: compiled.append(file))
    slim.compile_imported(everything=True)
    assert torch.__file__ in compiled
    assert [file for file in compiled if not Path(file).is_file()] == []

"""The files of a deployment, as committed, and a check that a command line is one of `driftguard`'s."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import typer
import yaml
from driftguard_engine.__main__ import app as engine_app

from driftguard.cli import app
from driftguard.settings import PREFIX

ROOT: Final = Path(__file__).parents[2]
DEPLOY: Final = ROOT / "deploy"
KUBERNETES: Final = DEPLOY / "kubernetes"
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VERSION: Final = str(PROJECT["version"])


def tool(name: str) -> str | None:
    """A program of build/tools, where the Makefile puts some, or of the system."""
    return shutil.which(name, path=str(ROOT / "build" / "tools")) or shutil.which(name)


def documents(file: Path) -> list[dict[str, Any]]:
    """The YAML documents of a file."""
    return [document for document in yaml.safe_load_all(file.read_text(encoding="utf-8")) if document]


def manifests() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every Kubernetes object, with its file."""
    for file in sorted(KUBERNETES.rglob("*.yaml")):
        if file.name != "kustomization.yaml":
            for document in documents(file):
                yield file, document


def parse_command(arguments: list[str]) -> None:
    """Parses arguments of `driftguard`, without its name. Raises click's UsageError: no such option."""
    command: Any = typer.main.get_command(app)
    name = "driftguard"
    if arguments[0] == "engine":
        command, name, arguments = typer.main.get_command(engine_app), "driftguard engine", arguments[1:]
    while (get := getattr(command, "get_command", None)) is not None:
        found = get(typer.Context(command), arguments[0])
        assert found is not None, f"{name} has no command {arguments[0]}"
        command, name, arguments = found, f"{name} {arguments[0]}", arguments[1:]
    command.make_context(name, list(arguments))


def commands_of_shell(script: str) -> list[list[str]]:
    """The arguments of each `driftguard` in a script of shell, also of one that runs in a container."""
    lines = re.sub(r"(^|\s)#.*$|\s2>&1", "", script.replace("\\\n", " "), flags=re.MULTILINE)
    lexer = shlex.shlex(lines.replace("\n", ";"), posix=True, punctuation_chars=";&|()<>")
    lexer.commenters = ""
    lexer.whitespace_split = True
    simple: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set(";&|()<>"):
            simple.append([])
        else:
            simple[-1].append(word)
    return [words[start:] for words in simple if (start := _arguments(words)) is not None]


def _arguments(words: list[str]) -> int | None:
    """Where the arguments of `driftguard` begin; None where these words run another command."""
    if words[:3] == ["docker", "compose", "exec"]:
        if next(word for word in words[3:] if not word.startswith("-")) != "driftguard":
            return None  # a program of another service
        return words.index("driftguard", words.index("driftguard") + 1) + 1
    for number, word in enumerate(words):
        if Path(word).name == "driftguard":
            return number + 1
        if word not in ("until", "exec") and "=" not in word:
            return None
    return None


def set_environment(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    """Nothing of the tests' own environment reaches the settings."""
    for name in list(os.environ):
        if name.startswith(PREFIX):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

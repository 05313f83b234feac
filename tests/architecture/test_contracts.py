"""Every module stands in a contract of layers: the order in which modules import each other is written down.

The rule: a package with more than five modules directly inside it has an exhaustive contract of layers of its
own in pyproject.toml, and so has every package that is installed. A smaller package needs none: the contract
around it names it, and between its modules there is no import circle (test_figures.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
from importlinter import api

from tests.architecture.imports import PACKAGES, whole_tree

MODULES_WITHOUT_LAYERS: Final = 5
PYPROJECT: Final = Path(__file__).parents[2] / "pyproject.toml"


@pytest.fixture(scope="module")
def contracts() -> list[dict[str, Any]]:
    configuration: dict[str, Any] = api.read_configuration(str(PYPROJECT))
    return [contract for contract in configuration["contracts_options"] if contract["type"] == "layers"]


def test_every_package_of_more_than_five_modules_has_layers(contracts: list[dict[str, Any]]) -> None:
    graph = whole_tree()
    needing = {
        package
        for package in graph.modules
        if package in PACKAGES or len(graph.find_children(package)) > MODULES_WITHOUT_LAYERS
    }
    layered = {container for contract in contracts for container in contract["containers"]}
    assert sorted(needing - layered) == []


def test_every_contract_of_layers_names_all_modules_of_its_package(contracts: list[dict[str, Any]]) -> None:
    """Then import-linter fails for a new module that is in no layer."""
    loose = [
        contract["name"]
        for contract in contracts
        if contract.get("exhaustive") != "True" or "exhaustive_ignores" in contract
    ]
    assert loose == []


def test_import_linter_looks_at_every_installed_package() -> None:
    session = api.read_configuration(str(PYPROJECT))["session_options"]
    assert set(session["root_packages"]) == set(PACKAGES)

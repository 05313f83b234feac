"""Upper bounds of what a reader has to hold in mind: rooms, levels and arrows, as imports.py counts them.

The whole tree once had 50 rooms, 13 levels and 203 arrows by the same rule. A change that needs more raises a
bound here, where its reviewers see it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import driftguard
from tests.architecture.imports import Rooms, rooms_of, rooms_of_tree, whole_tree

MODULES_AT_THE_TOP = 9  # .py files directly in driftguard/


def assert_at_most(rooms: Rooms, most_rooms: int, most_levels: int, most_arrows: int) -> None:
    found = len(rooms.names), rooms.levels, rooms.arrow_count
    most = most_rooms, most_levels, most_arrows
    assert all(each <= bound for each, bound in zip(found, most, strict=True)), (
        f"rooms, levels, arrows: {found}, at most {most}"
    )


def test_the_whole_tree() -> None:
    assert_at_most(rooms_of_tree(), 33, 9, 150)


@pytest.mark.parametrize(
    ("package", "rooms", "levels", "arrows"),
    [
        ("driftguard.detection", 14, 8, 61),
        ("driftguard.retraining", 10, 8, 28),
        ("driftguard_engine", 22, 8, 58),
    ],
)
def test_inside_the_largest_packages(package: str, rooms: int, levels: int, arrows: int) -> None:
    assert_at_most(rooms_of(package), rooms, levels, arrows)


def test_no_package_has_modules_that_import_each_other_in_a_circle() -> None:
    graph = whole_tree()
    for package in graph.modules:
        if graph.find_children(package):
            _ = rooms_of(package).levels  # raises at a circle


def test_few_modules_stand_outside_of_packages() -> None:
    files = Path(str(driftguard.__file__)).parent.glob("*.py")
    assert len(list(files)) <= MODULES_AT_THE_TOP

"""The imports of the whole tree, as rooms and arrows.

A package that is looked into has rooms: each module and each package directly inside it, and its own
`__init__`. An arrow is "some module of one room imports some module of another", counted once however many
imports there are. Imports inside functions and under TYPE_CHECKING count like all others: a reader follows
them too. A room without arrows is not counted. Levels: the rooms of the longest chain of arrows.

In the whole tree the rooms are those of `driftguard`; each other package that is installed is one room.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from typing import Final

import grimp

PACKAGES: Final = (
    *("driftguard", "driftguard_http", "driftguard_vllm"),
    *("driftguard_engine", "driftguard_training"),
)


@cache
def whole_tree() -> grimp.ImportGraph:
    return grimp.build_graph(*PACKAGES, include_external_packages=False, cache_dir=None)


@dataclass(frozen=True, slots=True)
class Rooms:
    """`arrows`: room -> the rooms that it imports; without those that take part in no arrow."""

    arrows: Mapping[str, set[str]]

    @property
    def names(self) -> set[str]:
        return set(self.arrows).union(*self.arrows.values())

    @property
    def arrow_count(self) -> int:
        return sum(map(len, self.arrows.values()))

    @property
    def levels(self) -> int:
        """Raises graphlib.CycleError, which names the rooms, where they import each other in a circle."""
        level: dict[str, int] = {}
        for room in TopologicalSorter(self.arrows).static_order():  # the imported ones first
            level[room] = 1 + max((level[each] for each in self.arrows.get(room, ())), default=0)
        return max(level.values(), default=0)


def rooms_of_tree() -> Rooms:
    def room(module: str) -> str:
        top, *below = module.split(".")
        return ".".join([top, *below[:1]]) if top == "driftguard" else top

    return _rooms(room)


def rooms_of(package: str) -> Rooms:
    """Raises ValueError for a package that is not in the tree."""
    if package not in whole_tree().modules:
        raise ValueError(f"no package {package}")
    depth = package.count(".") + 2

    def room(module: str) -> str | None:
        inside = module == package or module.startswith(f"{package}.")
        return ".".join(module.split(".")[:depth]) if inside else None

    return _rooms(room)


def _rooms(room_of: Callable[[str], str | None]) -> Rooms:
    """`room_of`: the room of a module, None outside of what is looked into."""
    graph = whole_tree()
    arrows: dict[str, set[str]] = defaultdict(set)
    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            one, other = room_of(importer), room_of(imported)
            if one is not None and other is not None and one != other:
                arrows[one].add(other)
    return Rooms(dict(arrows))

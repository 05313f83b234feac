"""The files of a target, in whose place another revision of it may come while a draft is made for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from driftguard.errors import Conflict

_SUFFIXES: Final = frozenset({".safetensors", ".json"})  # weights, configuration, tokenizer


@dataclass(frozen=True, slots=True)
class TargetFiles:
    """`found`: by name, size and time of modification. Their contents would take minutes to read."""

    target: str
    directory: Path | None
    found: Mapping[str, tuple[int, int]]

    @classmethod
    def now(cls, target: str, directory: Path | None) -> TargetFiles:
        """Empty where there is no such directory, which the training names. Raises OSError."""
        paths = [] if directory is None or not directory.is_dir() else list(directory.iterdir())
        stats = {path.name: path.stat() for path in paths if path.suffix in _SUFFIXES}
        return cls(target, directory, {name: (one.st_size, one.st_mtime_ns) for name, one in stats.items()})

    def check(self) -> None:
        """Raises Conflict: they are others by now. OSError."""
        now = self.now(self.target, self.directory).found
        for name in sorted(self.found.keys() | now.keys()):
            if self.found.get(name) != now.get(name):
                raise Conflict(
                    f"{name} of target {self.target} in {self.directory} was changed since the training "
                    "began: the candidate was made for another one"
                )

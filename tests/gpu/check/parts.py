"""The parts of a check, each run in a process of its own, in the order of what they tell. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

WHOLE = 560.0  # seconds for one call: machines are lent for ten minutes at a time


@dataclass(frozen=True, slots=True)
class Part:
    """function: `module:name`, called with a `Run`. limit_seconds: after which its process is ended."""

    name: str
    function: str
    limit_seconds: float


def _part(name: str, module: str, limit_seconds: float) -> Part:
    return Part(name, f"tests.gpu.check.{module}:{name.replace('-', '_')}", limit_seconds)


BUILD = _part("build", "building", 60)
FIRST = (
    BUILD,
    _part("self-tests", "self_tests", 30),
    _part("equality", "suite", 100),
    _part("verification", "verification", 45),
    _part("linear-layers", "linear_times", 25),
    _part("plain-decode", "loop.parts", 60),
    _part("sweep", "loop.parts", 60),
    _part("peers", "verification", 50),
    _part("counters", "counters", 40),
    _part("tests", "suite", WHOLE),
)
SECOND = (
    BUILD,
    _part("sanitizers", "sanitize", 240),
    _part("draws", "suite", 120),
    _part("adaptive-batches", "loop.parts", 150),
    _part("other-acceptances", "loop.parts", 120),
    _part("prefixes", "loop.parts", 60),
    _part("other-engines", "loop.parts", 120),
)
PARTS = {part.name: part for part in (*FIRST, *SECOND)}

"""A diagnosis, as stored with its incident."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Final, Literal

Cause = Literal[
    "query_drift",
    "mix_shift",
    "machine",
    "engine_state",
    "cache",
    "draft_wrong",
    "template",
    "load",
    "configuration",
    "target_replaced",
    "quality",
    "unknown",
]
Confidence = Literal["high", "medium", "low"]
Number = float | int | str | None

CONFIDENCES: Final[tuple[Confidence, ...]] = ("low", "medium", "high")  # rising

CONFIDENCE_MEANS: Final[dict[Confidence, str]] = {
    "high": "the deciding test rejects at 1% and the other causes are excluded",
    "medium": "one piece of evidence decides, or another cause could not be excluded; none contradicts",
    "low": "evidence is missing or contradictory",
}


@dataclass(frozen=True, slots=True)
class Fact:
    """One piece of evidence: a sentence for people, and the numbers behind it."""

    about: str  # probes, configuration, mix, queries, slices, ...: the kind of evidence
    text: str
    numbers: dict[str, Number]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why acceptance changed. CONFIDENCE_MEANS defines `confidence`; `reason` says why it has this level.

    `retrain`: the cause calls for a new draft. Whether one is trained automatically is decided elsewhere, by
    the least confidence in the settings. `examples`: record ids of captured requests that are typical of the
    new traffic. `confirmed_by`: the one command that would confirm the cause; empty in diagnoses of a version
    that did not say it.
    """

    cause: Cause
    confidence: Confidence
    summary: str  # the likely cause in a few words, for the end of a page
    reason: str
    facts: tuple[Fact, ...]
    missing: tuple[str, ...]
    recommended_action: str
    retrain: bool
    awaits_probes: bool
    examples: tuple[str, ...] = ()
    confirmed_by: str = ""


PROBE: Final = "`driftguard probe run --server SERVER`"


def for_server(text: str, server: str) -> str:
    """A text of a diagnosis, with the name of the server in its commands, as a shell takes it."""
    return text.replace("--server SERVER", f"--server {shlex.quote(server)}")

"""The interface of every scrape adapter. `counters.CounterAdapter` is the one for engines with complete
counters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from driftguard.adapters.reading import Reading
from driftguard.adapters.window import Identity, Window
from driftguard.records import Fidelity

Kind = Literal[
    "vllm",
    "sglang",
    "tgi",
    "tensorrt_llm",
    "llamacpp",
    "lmdeploy",
    "bentoml",
    "driftguard",
    "opentelemetry",  # DriftGuard's own metric names; pushed only, never scraped
]


class Adapter(Protocol):
    """Reads the metrics of one serving engine. Pure."""

    @property
    def kind(self) -> Kind: ...

    @property
    def name(self) -> str:
        """The engine's usual spelling."""
        ...

    @property
    def prefix(self) -> str:
        """The prefix of its metrics' names."""
        ...

    @property
    def path(self) -> str:
        """The path of its metrics."""
        ...

    @property
    def names(self) -> frozenset[str]:
        """The names of the samples that `windows` needs."""
        ...

    @property
    def fidelity(self) -> Fidelity:
        """The best fidelity that its metrics allow."""
        ...

    @property
    def names_target(self) -> bool:
        """Whether its metrics contain the model's name."""
        ...

    @property
    def show_metrics(self) -> str:
        """How to make the server expose these metrics."""
        ...

    @property
    def speculate(self) -> str:
        """How to make it speculate."""
        ...

    def windows(self, before: Reading, after: Reading, known: Identity) -> Sequence[Window]:
        """One per target, or per stream and segment if the metrics distinguish them; none if the server has
        no series of speculation. Raises Incomplete, LeftOut."""
        ...

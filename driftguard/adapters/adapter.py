"""What every scrape adapter offers. `counters.CounterAdapter` serves the engines with complete counters."""

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
    "opentelemetry",  # metrics of our own names, which are pushed: nobody serves them
]


class Adapter(Protocol):
    """Reads the metrics of one serving engine. Pure."""

    @property
    def kind(self) -> Kind: ...

    @property
    def name(self) -> str:
        """As people write it."""
        ...

    @property
    def prefix(self) -> str:
        """What the names of its metrics begin with."""
        ...

    @property
    def path(self) -> str:
        """Where it serves them."""
        ...

    @property
    def names(self) -> frozenset[str]:
        """The samples that `windows` wants to see."""
        ...

    @property
    def fidelity(self) -> Fidelity:
        """The best that its metrics allow."""
        ...

    @property
    def names_target(self) -> bool:
        """Whether its metrics carry the model's name."""
        ...

    @property
    def show_metrics(self) -> str:
        """How to make the server show these metrics."""
        ...

    @property
    def speculate(self) -> str:
        """How to make it speculate."""
        ...

    def windows(self, before: Reading, after: Reading, known: Identity) -> Sequence[Window]:
        """One per target, or per stream and segment where the metrics tell them; none where the server has
        no series of speculation. Raises Incomplete, LeftOut."""
        ...

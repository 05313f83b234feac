"""The measurements of the loop, kept in one file, so that nothing is lost when a process is."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path

ADAPTIVE = "adaptive"
TRANSFORMERS = "transformers assisted generation"


@dataclass(frozen=True, slots=True)
class Served:
    """What requests got in steps that took so long, all of them decoding."""

    seconds: float
    steps: int
    tokens: int
    accepted: int  # drafts, over the whole life of the requests
    tested: int  # drafts that were accepted or rejected: those behind a rejection are neither
    context: float  # mean tokens of a sequence

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def milliseconds(self) -> float:
        """Of a step."""
        return 1e3 * self.seconds / self.steps

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.tested if self.tested else None


@dataclass(frozen=True, slots=True)
class PlainTime:
    """One request without speculation, beside what its bytes take at the bandwidth of a copy."""

    served: Served
    bytes: int
    bytes_per_second: float

    @property
    def bound_milliseconds(self) -> float:
        return 1e3 * self.bytes / self.bytes_per_second

    @property
    def of_bound(self) -> float:
        return self.bound_milliseconds / self.served.milliseconds


@dataclass(frozen=True, slots=True)
class SpeculativeTime:
    """stated: acceptance that the draft was made for. plain: the same engine without speculation."""

    stated: float
    batch: int
    drafts: str  # K, or ADAPTIVE
    served: Served
    plain: Served
    note: str = ""

    @property
    def speedup(self) -> float:
        return self.served.tokens_per_second / self.plain.tokens_per_second


@dataclass(frozen=True, slots=True)
class PeerSpeed:
    """Another engine with the same two models, one request."""

    name: str
    stated: float | None
    tokens_per_second: float | None
    note: str


@dataclass(frozen=True, slots=True)
class PrefixTime:
    """To the first token of one request alone, without a known beginning of its prompt and with one."""

    prompt_tokens: int
    reused_tokens: int
    new_milliseconds: float
    known_milliseconds: float

    @property
    def speedup(self) -> float:
        return self.new_milliseconds / self.known_milliseconds


@dataclass(frozen=True, slots=True)
class Synchronisations:
    """Of steps while requests decode. refused: torch's error where its debug mode refuses calls that wait.

    uncounted: why the profiler's counts are not known.
    """

    what: str
    steps: int
    refused: str | None
    waits: dict[str, int] = field(default_factory=dict)  # calls that wait for all that is queued
    readbacks: int = 0  # waits for the event behind the step before
    allocations: int = 0  # calls that take or give back memory: they may wait
    uncounted: str | None = None

    @property
    def total(self) -> int:
        return sum(self.waits.values())


@dataclass(frozen=True, slots=True)
class KernelTime:
    name: str
    count: float  # per step
    microseconds: float  # per step


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Where a step's time goes on the device. milliseconds: of a step, without the profiler."""

    what: str
    milliseconds: float
    kernels: list[KernelTime]  # the longest first
    groups: dict[str, float]  # microseconds per step

    @property
    def gaps_microseconds(self) -> float:
        """What no kernel fills."""
        return 1e3 * self.milliseconds - sum(self.groups.values())


@dataclass(slots=True)
class LoopMeasured:
    models: str = ""
    plain: PlainTime | None = None
    speculation: list[SpeculativeTime] = field(default_factory=list)
    peers: list[PeerSpeed] = field(default_factory=list)
    batches: list[SpeculativeTime] = field(default_factory=list)
    prefix: PrefixTime | None = None
    synchronisations: list[Synchronisations] = field(default_factory=list)
    breakdowns: list[Breakdown] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    settled: list[str] = field(default_factory=list)  # parts that are done or have failed
    running: str | None = None  # the part that is being measured

    def best(self, stated: float) -> SpeculativeTime | None:
        """Of one request, over K."""
        rows = [row for row in self.speculation if row.stated == stated]
        return max(rows, key=lambda row: row.speedup, default=None)

    def save(self, path: Path) -> None:
        new = path.with_suffix(".new")
        new.write_bytes(pickle.dumps(self))
        new.replace(path)


def read(path: Path) -> LoopMeasured:
    """What a process of this program wrote; nothing measured where it wrote nothing."""
    if not path.exists():
        return LoopMeasured()
    found: LoopMeasured = pickle.loads(path.read_bytes())
    return found

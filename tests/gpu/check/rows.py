"""What one run finds out, a JSON object on a line of its own for each: nothing is lost when a process is.

No torch: the program that starts the parts must not depend on the device.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

ADAPTIVE = "adaptive"
TRANSFORMERS = "transformers assisted generation"


@dataclass(frozen=True, slots=True)
class Begun:
    """A part has been started. at_seconds: since the beginning of the run."""

    part: str
    at_seconds: float
    limit_seconds: float


@dataclass(frozen=True, slots=True)
class Ended:
    """failed: a test failed, a check found something, or the part broke."""

    part: str
    seconds: float
    outcome: str
    failed: bool


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What there was no time for."""

    what: str


@dataclass(frozen=True, slots=True)
class Checked:
    """The outcome of a test or a check."""

    what: str
    outcome: str
    failed: bool


@dataclass(frozen=True, slots=True)
class Machine:
    gpu: str
    capability: str
    multiprocessors: int
    memory_gib: float
    l2_bytes: int
    driver: str
    python: str
    torch: str
    nvrtc: str
    bindings: str

    def lines(self) -> list[tuple[str, str]]:
        """Names and values."""
        return [
            ("GPU", f"{self.gpu}, compute capability {self.capability}"),
            ("multiprocessors", str(self.multiprocessors)),
            ("memory, L2", f"{self.memory_gib:.0f} GiB, {self.l2_bytes / 2**20:.0f} MiB"),
            ("driver", self.driver),
            ("torch", self.torch),
            ("NVRTC", self.nvrtc),
            ("cuda-bindings", self.bindings),
            ("Python", self.python),
        ]


@dataclass(frozen=True, slots=True)
class BuildTime:
    first_start_seconds: float  # compiled and loaded
    later_start_seconds: float  # taken from the cache


@dataclass(frozen=True, slots=True)
class Resources:
    """Of one kernel. Stack and spills are slow local memory: a kernel that was meant to have none is ill."""

    kernel: str
    registers: int  # per thread
    stack_bytes: int  # per thread
    spill_bytes: int  # stored and loaded, per thread
    shared_bytes: int  # static, per block

    @property
    def uses_local_memory(self) -> bool:
        return self.stack_bytes > 0 or self.spill_bytes > 0


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Of a large copy, bytes read plus bytes written."""

    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class VerifyTime:
    """Of a batch at temperature 1."""

    batch: int
    drafts: int
    cold: float  # microseconds
    warm: float
    floor: float  # microseconds: the bytes that must move, at the bandwidth of a copy
    bytes: int
    accepted: float  # drafts per request, on these data
    parts: dict[str, float]  # microseconds, cold, each kernel on its own

    @property
    def over_floor(self) -> float:
        return self.cold / self.floor


@dataclass(frozen=True, slots=True)
class PeerTime:
    """Another verifier on the same batch as a `VerifyTime`. ratio: its time by ours."""

    batch: int
    drafts: int
    name: str
    microseconds: float | None
    ratio: float | None
    note: str = ""
    accepted: float | None = None  # drafts per request: of the same data as ours, by its own random numbers


@dataclass(frozen=True, slots=True)
class SamplingTime:
    """Of a batch with these sampling parameters."""

    name: str
    batch: int
    drafts: int
    verify: float  # microseconds, cold
    draw: float  # of one draft
    draw_floor: float
    parts: dict[str, float]  # microseconds, cold, each kernel of `verify` on its own


@dataclass(frozen=True, slots=True)
class LinearTime:
    layer: str
    size: int  # features, N
    inner: int  # K
    tokens: int
    kernel: float  # microseconds, cold
    library: float  # likewise; gated: and the kernel of the gate
    floor: float  # microseconds: the bytes that must move, at the bandwidth of a copy


@dataclass(frozen=True, slots=True)
class Counters:
    """What the device counted of one launch, by Nsight Compute; `values` by the metric's name and unit."""

    kernel: str
    what: str
    values: dict[str, float]


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
class BatchTime(SpeculativeTime):
    """One of those that compare numbers of requests, not numbers of drafts."""


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


@dataclass(frozen=True, slots=True)
class LoopModels:
    """The synthetic pair that the loop is measured with."""

    name: str


Row = (
    Begun | Ended | LeftOut | Checked | Machine | BuildTime | Resources | Bandwidth | VerifyTime | PeerTime
    | SamplingTime | LinearTime | Counters | PlainTime | SpeculativeTime | BatchTime | PeerSpeed | PrefixTime
    | Synchronisations | Breakdown | LoopModels
)  # fmt: skip
_KINDS: dict[str, type[Row]] = {kind.__name__: kind for kind in get_args(Row)}
_Kind = TypeVar("_Kind", bound=Row)


@dataclass(frozen=True, slots=True)
class Findings:
    """The rows of a run, in their order."""

    rows: tuple[Row, ...] = ()

    def of(self, kind: type[_Kind]) -> list[_Kind]:
        """Those of exactly this kind."""
        return [row for row in self.rows if type(row) is kind]

    def newest(self, kind: type[_Kind]) -> _Kind | None:
        return next(reversed(self.of(kind)), None)

    @property
    def failures(self) -> list[str]:
        ended = [f"{row.part}: {row.outcome}" for row in self.of(Ended) if row.failed]
        return ended + [f"{row.what}: {row.outcome}" for row in self.of(Checked) if row.failed]

    def best(self, stated: float) -> SpeculativeTime | None:
        """Of one request at this acceptance, over K."""
        tried = [row for row in self.of(SpeculativeTime) if row.stated == stated]
        return max(tried, key=lambda row: row.speedup, default=None)


def append(path: Path, row: Row) -> None:
    """Adds the row to the file, where it outlives this process: whole, in one write."""
    line = json.dumps({"row": type(row).__name__, **asdict(row)}, allow_nan=False)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, f"{line}\n".encode())
        os.fsync(file)
    finally:
        os.close(file)


def read(path: Path) -> Findings:
    """The rows of a file; none where there is none. A line that `append` did not write is a failed check."""
    if not path.exists():
        return Findings()
    lines = path.read_text(encoding="utf-8").splitlines()
    return Findings(tuple(_row(line, f"{path.name}, line {number}") for number, line in enumerate(lines, 1)))


def _row(line: str, where: str) -> Row:
    try:
        values = json.loads(line)
        row: Row = _decoded(_KINDS[values.pop("row")], values)
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        return Checked(where, f"is unreadable: {problem!r}", failed=True)
    return row


def _decoded(kind: Any, value: Any) -> Any:
    """value as JSON has it -> a value of this type."""
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{each.name: _decoded(hints[each.name], value[each.name]) for each in fields(kind)})  # type: ignore[operator]
    if origin is list:
        return [_decoded(inner[0], each) for each in value]
    if origin is dict:
        return {name: _decoded(inner[1], each) for name, each in value.items()}
    return value

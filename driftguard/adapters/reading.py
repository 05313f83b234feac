"""One scrape of a server, and the increase of its counters since the previous scrape.

Counters of a process begin at 0 when it starts, and a restart is detected in two ways:
`process_start_time_seconds` changes, or a counter falls. In both cases the counter holds the counts since the
restart, so nothing is lost and no increase is negative. Without a start time, all counters with the same
labels (except for the position) restart together: those of one rank or one replica, which may restart without
the others. Nor does a server go on of whose counters none is left: some print a counter from its first
increment on, and another version may print it with other labels. llama.cpp gives a start time beside its
metrics, of a clock of its own (`process`). OTLP gives the start time of each counter (`starts`); without a
process start time, a later one is a restart too.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from driftguard.adapters.window import Incomplete

Labels = frozenset[tuple[str, str]]

START_TIME = "process_start_time_seconds"
START_HEADER: Final = (
    "Process-Start-Time-Unix"  # of llama.cpp's answer: its machine's microseconds since boot
)
SAME_START_SECONDS = 1.0
LATEST_START: Final = 1e11  # in the year 5138; what is later is told in milliseconds, or garbage
POSITION_LABELS = frozenset({"position", "token_position", "driftguard.position"})
WORKER_LABELS: Final = frozenset({"engine", "worker_addr"})  # of processes whose metrics are shown together
MAX_POSITION: Final = 1_023
MAX_VALUES: Final = 1_000  # of a label that distinguishes windows
MISSING_KEPT: Final = 1_000  # series of one counter

_SERIES_KEPT: Final = 4_096  # 200 servers of 20 series each, at most some 4 MB
_LONGEST_KEPT: Final = 1_000  # characters of a line
_PLAIN: Final = re.compile(r"[0-9.eE+-]+")  # plain numbers; the library parses all others


class Unreadable(ValueError):
    """not the Prometheus text format: {detail}"""


@dataclass(frozen=True, slots=True)
class Reading:
    """The samples of one scrape that an adapter asked for: name -> labels -> finite value. `starts`: when
    a counter began to count, in seconds since 1970, if known. `process`: tells the process that answered from
    others, if not empty."""

    at: datetime
    samples: Mapping[str, Mapping[Labels, float]]
    starts: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)
    process: str = ""

    @classmethod
    def parse(cls, text: str, names: Collection[str], at: datetime, process: str = "") -> Reading:
        """Reads the samples with exactly these `names`, and the start time; not `_created`, `_bucket` and
        other names. Raises Unreadable.
        """
        # An engine prints 600 lines, of which 20 are needed.
        wanted = {*names, START_TIME}
        lines = [line for line in text.split("\n") if line.partition("{")[0].partition(" ")[0] in wanted]
        samples: dict[str, dict[Labels, float]] = defaultdict(dict)
        try:
            for line in lines:
                name, labels, value = _sample(line)
                if math.isfinite(value):
                    samples[name][labels] = value
        except (ValueError, KeyError, IndexError) as error:
            raise Unreadable(f"not the Prometheus text format: {error}") from None
        return cls(at, dict(samples), process=process)

    @property
    def started_at(self) -> float | None:
        """Seconds since 1970; None if the server does not give it, if several processes answer, or if it is
        no time in seconds."""
        found = self.samples.get(START_TIME, {})
        start = next(iter(found.values())) if len(found) == 1 else None
        return start if start is not None and 0.0 <= start < LATEST_START else None

    @property
    def told_process(self) -> str | float | None:
        """What distinguishes the process that answered from others; None if the server does not tell."""
        return self.process or self.started_at

    def after(self, before: Reading) -> Reading:
        """This one, at which the next window begins, with the last values of the counters in `before` that it
        lacks, as of a worker that a router could not reach: once they are back, they have counted on from
        there. None of a process that has ended, and those missing for the shortest time if there are many."""
        counters = _counters_of(before)
        if _nothing_goes_on(before, self, counters):
            return self
        ended = {_group(labels, WORKER_LABELS) for labels in _restarted_groups(before, self, counters)}
        samples = dict(self.samples)
        for name in counters:
            present = self.samples.get(name, {})
            missing = [
                (labels, value)
                for labels, value in before.samples[name].items()
                if labels not in present and _group(labels, WORKER_LABELS) not in ended
            ]
            samples[name] = {**dict(missing[-MISSING_KEPT:]), **present}
        return replace(self, samples=samples)

    def of(self, name: str, **labels: str) -> dict[Labels, float]:
        """The series of one name with these labels."""
        wanted = frozenset(labels.items())
        return {key: value for key, value in self.samples.get(name, {}).items() if wanted <= key}

    def total(self, name: str, **labels: str) -> float | None:
        """Sum over the series; None if there is none."""
        found = self.of(name, **labels)
        return sum(found.values()) if found else None

    def whole(self, name: str, **labels: str) -> int | None:
        total = self.total(name, **labels)
        return None if total is None else round(total)

    def values_of(self, name: str, label: str) -> set[str]:
        """The values of a label; '' if a series lacks it. Raises Incomplete if there are too many: each would
        be a window, which reads all series."""
        found = {dict(key).get(label, "") for key in self.samples.get(name, {})}
        if len(found) > MAX_VALUES:
            raise Incomplete(f"{name}: more than {MAX_VALUES} values of {label}")
        return found


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Readings of a server whose counts are printed rounded, so that a window goes on over several of them.
    `newest`: the last one. `drafting`: the last one before which draft tokens were counted, or where the
    window began."""

    newest: Reading
    drafting: Reading


def sums_and_counts(*histograms: str) -> frozenset[str]:
    """The samples of histograms from which means are made."""
    return frozenset(f"{histogram}_{part}" for histogram in histograms for part in ("sum", "count"))


def sample_names(text: str) -> Iterator[str]:
    lines = (line for line in text.split("\n") if not line.startswith("#"))
    return (line.partition("{")[0].partition(" ")[0] for line in lines)


def _sample(line: str) -> tuple[str, Labels, float]:
    """Name, labels, value. Raises ValueError, KeyError, IndexError."""
    series, _, value = line.rpartition(" ")
    known = _series(series) if len(line) <= _LONGEST_KEPT else None
    if known is None or not _PLAIN.fullmatch(value):
        sample = _read(line)
        return sample.name, frozenset(sample.labels.items()), sample.value
    return *known, float(value)


@lru_cache(_SERIES_KEPT)
def _series(text: str) -> tuple[str, Labels] | None:
    """Name and labels in front of a value. They are the same at every scrape, and are cached because the
    library takes 50 us to parse them. None if `text` is anything else: a timestamp follows the value, or
    there is none."""
    try:
        sample = _read(f"{text} 0")
    except (ValueError, KeyError, IndexError):
        return None
    return None if sample.timestamp is not None else (sample.name, frozenset(sample.labels.items()))


def _read(line: str) -> Sample:
    """Raises ValueError, KeyError, IndexError."""
    ((sample,),) = (family.samples for family in text_string_to_metric_families(f"{line}\n"))
    return sample


@dataclass(frozen=True, slots=True)
class Increase:
    """The increase of counters from one reading to the next; `begun_at`: its start; of a restart, that or
    the middle of the two readings, whichever is later."""

    samples: Reading
    begun_at: datetime

    @classmethod
    def between(
        cls,
        before: Reading,
        after: Reading,
        counters: Collection[str],
        *,
        processes: Collection[str] | None = None,
    ) -> Increase:
        """`processes`: labels by which the counters of several processes are told apart; those of one restart
        together, whatever their other labels are. None: all labels but the position do that."""
        is_another = _nothing_goes_on(before, after, counters)
        groups = {} if is_another else _restarted_groups(before, after, counters, processes)
        gained = {
            name: {
                labels: value
                if is_another or _group(labels, processes) in groups
                else value - before.samples.get(name, {}).get(labels, 0.0)
                for labels, value in after.samples[name].items()
            }
            for name in counters
            if name in after.samples
        }
        if is_another:
            begun_at = _begun_after(_restarted_at(before, after), before, after)
        elif groups:
            starts = [start for start in groups.values() if start is not None]
            known = datetime.fromtimestamp(min(starts), UTC) if starts else None
            begun_at = _begun_after(known, before, after)
        else:
            begun_at = before.at
        return cls(Reading(after.at, gained), begun_at)

    def of(self, name: str, **labels: str) -> float | None:
        """Sum over the series of one name; None if there is none."""
        return self.samples.total(name, **labels)

    def whole(self, name: str, **labels: str) -> int | None:
        return self.samples.whole(name, **labels)

    def mean(self, histogram: str, **labels: str) -> float | None:
        """sum / count; None if nothing was observed."""
        total, count = self.of(f"{histogram}_sum", **labels), self.of(f"{histogram}_count", **labels)
        return total / count if total is not None and count else None

    def per_position(self, name: str, label: str, **labels: str) -> list[int] | None:
        """See by_position."""
        return by_position(name, self.samples.of(name, **labels), label)


def by_position(name: str, series: Mapping[Labels, float], label: str) -> list[int] | None:
    """Counts of a metric by position, from 0 without a gap; None if there is none. Raises Incomplete."""
    found: dict[int, float] = defaultdict(float)
    for labels, value in series.items():
        place = value_of(name, labels, label)
        if not is_position(place):
            raise Incomplete(f"{name}: {label} {place[:20]!r} is not a position from 0 to {MAX_POSITION}")
        found[int(place)] += value
    return [round(found[place]) for place in range(max(found) + 1)] if found else None


def value_of(name: str, labels: Labels, label: str) -> str:
    """The value of a label of a series of the metric `name`. Raises Incomplete if it lacks the label."""
    value = dict(labels).get(label)
    if value is None:
        raise Incomplete(f"{name}: a series lacks the label {label}")
    return value


def is_position(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 4 and int(text) <= MAX_POSITION


def _restarted_at(before: Reading, after: Reading) -> datetime | None:
    then, now = before.started_at, after.started_at
    if then is None or now is None or abs(now - then) <= SAME_START_SECONDS:
        return None
    return datetime.fromtimestamp(now, UTC)


def _is_another_process(before: Reading, after: Reading) -> bool:
    return bool(before.process and after.process) and before.process != after.process


def _nothing_goes_on(before: Reading, after: Reading, counters: Collection[str]) -> bool:
    """Whether all counters begin anew: those of `after` are of another process, as far as is known."""
    is_another = _restarted_at(before, after) is not None or _is_another_process(before, after)
    return is_another or _are_gone(before, after, counters)


def has_restarted(before: Reading, after: Reading) -> bool:
    """Whether the server, or a part of it with counters of its own, restarted between the two."""
    counters = {*_counters_of(before), *_counters_of(after)}
    return _nothing_goes_on(before, after, counters) or bool(_restarted_groups(before, after, counters))


def _counters_of(reading: Reading) -> list[str]:
    return [name for name in reading.samples if name.endswith(("_total", "_sum", "_count"))]


def _are_gone(before: Reading, after: Reading, counters: Collection[str]) -> bool:
    """Whether there were counters, and none of them is left."""
    if before.started_at is not None and after.started_at is not None:
        return False  # which tell
    known = [(name, labels) for name in counters for labels in before.samples.get(name, {})]
    return bool(known) and not any(labels in after.samples.get(name, {}) for name, labels in known)


def _group(labels: Labels, processes: Collection[str] | None = None) -> Labels:
    if processes is None:
        return frozenset(item for item in labels if item[0] not in POSITION_LABELS)
    return frozenset(item for item in labels if item[0] in processes)


def _restarted_groups(
    before: Reading, after: Reading, counters: Collection[str], processes: Collection[str] | None = None
) -> dict[Labels, float | None]:
    """Groups of counters that restarted, and when they began to count; None if unknown."""
    same_process = before.started_at is not None and after.started_at is not None
    groups: dict[Labels, float | None] = {}
    for name in counters:
        for labels, value in after.samples.get(name, {}).items():
            start = None if same_process else _later_start(before, after, name, labels)
            if start is not None or value < before.samples.get(name, {}).get(labels, 0.0):
                group = _group(labels, processes)
                groups[group] = start or groups.get(group)
    return groups


def _later_start(before: Reading, after: Reading, name: str, labels: Labels) -> float | None:
    then = before.starts.get(name, {}).get(labels)
    now = after.starts.get(name, {}).get(labels)
    if then is None or now is None or now <= then + SAME_START_SECONDS:
        return None
    return now if now >= before.at.timestamp() - SAME_START_SECONDS else None


def _begun_after(restart: datetime | None, before: Reading, after: Reading) -> datetime:
    """When the increase after a restart begins; `restart`: None if it is not known. In the second half of the
    time between the readings, because the detector knows a restart by a gap that is longer than half of the
    window after it. A process starts long before it answers, as it loads its model first: its start alone
    would leave a short gap before a long window."""
    middle = before.at + (after.at - before.at) / 2
    return min(max(restart or middle, middle), after.at)

"""Runs records from files through the detector, without a database: `driftguard replay`.

Records are numbered over all the input: the N-th line that is not blank is record N, whether it is
good, bad or a probe. With one file without blank lines, `sed -n Np FILE` shows the record that an
event names. The files are read in the order given, `-` is standard input, and each stream's records
must be in the order in which they ended.

A line that is not a record is reported with its file, line and field and skipped; the exit code is
then 2. Probes are counted, but are not evidence; a window is one observation. `replay_files` reads the
formats.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import msgspec

from driftguard.adapters import ReplayFormat
from driftguard.adapters.window import Identity
from driftguard.cli.plain import plain_lines
from driftguard.cli.replay_files import NOTHING_KNOWN, Reader
from driftguard.detection import (
    Acceptance,
    AlarmWithheld,
    BaselineReady,
    BaselineSettled,
    DetectorConfig,
    DriftClosed,
    DriftOpened,
    DriftSeenGradual,
    DriftWidened,
    Finding,
    ObservationBatch,
    ProfileLearned,
    SegmentChange,
    StreamState,
    describe,
    fold,
)
from driftguard.detection.findings import FACTOR_NAMES, SessionsGiven, StratumBaseline, in_words
from driftguard.records import AcceptanceRecord, StreamKey
from driftguard.records.documents.acceptance import Gradual
from driftguard.records.positions import ACCEPTANCE, combined

CHUNK_RECORDS = 5_000
_SESSIONS_MEAN: dict[SessionsGiven, str] = {
    "given": "",
    "in part": "; of the others only neighbouring requests are treated as correlated",
    "not given": "; only neighbouring requests are treated as correlated",
    "no requests": "",
}


@dataclass(slots=True)
class Watched:
    """One stream of the replay: its detector's state and the draft's name as first seen."""

    key: StreamKey
    draft: str
    state: StreamState = field(default_factory=StreamState)


@dataclass(frozen=True, slots=True)
class ReplayEvent:
    """A finding and the stream that it is about."""

    watched: Watched
    finding: Finding


@dataclass(slots=True)
class Replay:
    """A running replay: feed it numbered records, and read its streams at the end."""

    config: DetectorConfig
    streams: dict[StreamKey, Watched] = field(default_factory=dict)
    records: int = 0
    probes: int = 0

    def feed(self, numbered: Iterable[tuple[int, AcceptanceRecord]]) -> Iterator[ReplayEvent]:
        """Yields the events in the order of the records, chunk by chunk."""
        rest = iter(numbered)
        while chunk := list(islice(rest, CHUNK_RECORDS)):
            yield from self._chunk(chunk)

    def _chunk(self, chunk: list[tuple[int, AcceptanceRecord]]) -> list[ReplayEvent]:
        of_stream: dict[StreamKey, list[tuple[int, AcceptanceRecord]]] = {}
        for number, record in chunk:
            self.records += 1
            if record.kind == "probe":
                self.probes += 1
            else:
                of_stream.setdefault(record.stream_key, []).append((number, record))
        events: list[ReplayEvent] = []
        for key, numbered in of_stream.items():
            numbers, records = zip(*numbered, strict=True)
            watched = self.streams.setdefault(key, Watched(key, records[0].draft))
            batch = ObservationBatch.from_records(numbers, records)
            watched.state, findings = fold(self.config, watched.state, batch)
            events += [ReplayEvent(watched, finding) for finding in findings]
        return sorted(events, key=lambda event: event.finding.ordinal)


def replay(records: Iterable[AcceptanceRecord], config: DetectorConfig) -> Iterator[ReplayEvent]:
    """The events of records that are numbered from 1 in their order."""
    return Replay(config).feed(enumerate(records, start=1))


def run_replay(
    files: list[Path],
    *,
    json: bool,
    false_alarm_every: float,
    minimum_drop: float,
    out: TextIO,
    err: TextIO,
    format: ReplayFormat = "records",  # noqa: A002 (what the option is called)
    known: Identity = NOTHING_KNOWN,
) -> int:
    """What `driftguard replay` does; returns its exit code: 0, or 2 when something could not be read.

    `json`: one JSON object per event and nothing else on `out`; otherwise text, with a summary at the
    end. `known`: values that the format lacks. Raises BadSettings when a number is out of its range.
    """
    config = DetectorConfig(false_alarm_every=false_alarm_every, minimum_drop=minimum_drop)
    running, reader = Replay(config), Reader(err, format, known)
    for event in running.feed(reader.read(files)):
        print(
            msgspec.json.encode(event_json(event)).decode() if json else plain_lines(event_text(event)),
            file=out,
        )
    if not json:
        print(plain_lines("\n".join(_summary(running))), file=out)
    reader.tell_total()
    return 2 if reader.problems else 0


def event_json(event: ReplayEvent) -> dict[str, Any]:
    """The event as `--json` prints it. Rates are ratios of sums; record numbers as in this module's text."""
    finding, key = event.finding, event.watched.key
    stream = {
        "server": key.server,
        "target": key.target,
        "draft": event.watched.draft,
        "draft_version": key.draft_version,
        "method": key.method,
    }
    common = {"stream": stream, "record": finding.ordinal, "ended_at": _time(finding.ended_at)}
    match finding:
        case BaselineReady():
            return {"event": "baseline_ready", **common, **_ready_json(finding)}
        case BaselineSettled():
            return {"event": "baseline_settled", **common, **_stratum_json(finding)}
        case ProfileLearned():
            return {"event": "profile_learned", **common, **_profile_json(finding)}
        case DriftOpened():
            return {"event": "incident_opened", **common, **_opened_json(finding)}
        case DriftWidened():
            return {"event": "incident_widened", **common, **_widened_json(finding)}
        case DriftSeenGradual():
            gradual = _gradual_json(finding.gradual)
            return {
                "event": "incident_seen_gradual",
                **common,
                "direction": finding.direction,
                "gradual": gradual,
            }
        case DriftClosed():
            return {"event": "incident_closed", **common, **_closed_json(finding)}
        case AlarmWithheld():
            evidence = {"evidence": finding.evidence, "false_alarm_every": finding.false_alarm_every}
            return {"event": "alarm_withheld", **common, "direction": finding.direction, **evidence}


def _ready_json(finding: BaselineReady) -> dict[str, Any]:
    return {
        **_stratum_json(finding),
        "reason": finding.why.text,
        "since": _time(finding.since),
        "standard_deviation_per_request": finding.standard_deviation,
        "variance_inflation": finding.variance_inflation,
        "false_alarm_every": finding.false_alarm_every,
    }


def _stratum_json(finding: StratumBaseline) -> dict[str, Any]:
    return {
        "segment": finding.segment,
        "stratum": finding.stratum,
        "requests": finding.requests,
        **_acceptance_json("acceptance", finding.acceptance),
        "mean_per_request": finding.mean_per_request,
        "fall_below": finding.fall_below,
        "rise_above": finding.rise_above,
    }


def _profile_json(finding: ProfileLearned) -> dict[str, Any]:
    return {
        "segment": finding.segment,
        "stratum": finding.stratum,
        "factor": finding.factor,
        "cycles": finding.cycles,
        "amplitude": finding.amplitude,
    }


def _opened_json(finding: DriftOpened) -> dict[str, Any]:
    return {
        "direction": finding.direction,
        "scope": finding.scope,
        "change_point": finding.change_point,
        "change_point_at": _time(finding.change_point_at),
        "interval": list(finding.interval),
        "interval_level": finding.interval_level,
        "segments": [_change_json(change) for change in finding.segments],
        **_acceptance_json("before", finding.before),
        **_acceptance_json("after", finding.after),
        "adjusted": asdict(finding.adjusted),
        "gradual": _gradual_json(finding.gradual),
        "requests_to_alarm": finding.requests_to_alarm,
        "evidence": finding.evidence,
        "false_alarm_every": finding.false_alarm_every,
    }


def _widened_json(finding: DriftWidened) -> dict[str, Any]:
    return {
        "direction": finding.direction,
        "change_point": finding.change_point,
        "change_point_at": _time(finding.change_point_at),
        "segments": [_change_json(change) for change in finding.segments],
        "requests_to_alarm": finding.requests_to_alarm,
    }


def _gradual_json(gradual: Gradual | None) -> dict[str, Any] | None:
    if gradual is None:
        return None
    times = {
        "onset_at": gradual.onset_at.isoformat(),
        "interval": [at.isoformat() for at in gradual.interval],
        "until": gradual.until.isoformat(),
    }
    return {**asdict(gradual), **times}


def _closed_json(finding: DriftClosed) -> dict[str, Any]:
    return {
        "direction": finding.direction,
        "reason": finding.reason,
        "opened_record": finding.opened_ordinal,
        "change_point": finding.change_point,
        "segments": [_change_json(change) for change in finding.segments],
        "left": list(finding.left),
    }


def _change_json(change: SegmentChange) -> dict[str, Any]:
    return {
        "segment": change.segment,
        **_acceptance_json("before", change.before),
        **_acceptance_json("after", change.after),
        "adjusted": None if change.adjusted is None else asdict(change.adjusted),
        "evidence": change.evidence,
    }


def _acceptance_json(name: str, acceptance: Acceptance) -> dict[str, Any]:
    return {
        name: acceptance.rate,
        f"{name}_interval": [acceptance.low, acceptance.high],
        f"{name}_requests": acceptance.requests,
        f"{name}_positions": acceptance.positions,
    }


def event_text(event: ReplayEvent) -> str:
    """The event for a reader at a terminal."""
    finding = event.finding
    head = f"record {finding.ordinal}, {_time(finding.ended_at)}, {_stream_text(event.watched)}:"
    match finding:
        case BaselineReady():
            watched = _baseline_text(finding)
            line = f"{head} segment {finding.segment} is watched from here; {watched}"
            return f"{line}\n    {finding.why.text} ({finding.stratum})"
        case BaselineSettled():
            known = _baseline_text(finding)
            return f"{head} segment {finding.segment} has its final baseline; {known}"
        case ProfileLearned():
            on = FACTOR_NAMES[finding.factor]
            if finding.amplitude == 0.0:
                return (
                    f"{head} segment {finding.segment} depends on {on} in another way, which is learned anew"
                )
            cycles = f"{finding.cycles} {'weeks' if finding.factor == 'week' else 'days'}"
            by = f"by {finding.amplitude:.3f} either way, learned from {cycles}"
            return f"{head} segment {finding.segment} depends on {on}, {by}; corrected from here"
        case DriftOpened():
            first, last = finding.interval
            when = (
                f"since record {finding.change_point} ({first} to {last}), {_time(finding.change_point_at)}"
            )
            if finding.gradual is not None and finding.gradual.certain:
                onset = _time(finding.gradual.onset_at.timestamp())
                when += f", gradually from about {onset} on, {finding.gradual.rate}"
            verb = {"down": "fell", "up": "rose"}[finding.direction]
            lines = [
                f"{head} {_acceptance_of(finding.segments)} {verb} {when}",
                *map(_change_text, finding.segments),
            ]
            return "\n".join(lines)
        case DriftWidened():
            verb = {"down": "fell", "up": "rose"}[finding.direction]
            when = f"since record {finding.change_point}, {_time(finding.change_point_at)}"
            lines = [f"{head} {_acceptance_of(finding.segments)} {verb} in more segments {when}"]
            return "\n".join([*lines, *map(_change_text, finding.segments)])
        case DriftSeenGradual():
            if finding.gradual is not None and finding.gradual.certain:
                return f"{head} {finding.gradual.text}"
            return f"{head} a change at once is as likely as one that came gradually"
        case DriftClosed():
            why = {
                "recovered": "has recovered",
                "no_traffic": "has no traffic left in the changed segments",
                "became_normal": "has stayed at its new level, which is the baseline from here",
            }
            acceptance = _acceptance_of(finding.segments)
            lines = [
                f"{head} {acceptance} {why[finding.reason]}; reported at record {finding.opened_ordinal}"
            ]
            left = [f"  it goes on in {', '.join(finding.left)}"] if finding.left else []
            return "\n".join([*lines, *map(_change_text, finding.segments), *left])
        case AlarmWithheld():
            moved = {"down": "fallen", "up": "risen"}[finding.direction]
            return f"{head} alarm withheld: the mean of the requests has not {moved}"


def _baseline_text(finding: StratumBaseline) -> str:
    acceptance = finding.acceptance
    return f"{ACCEPTANCE[acceptance.positions]} {acceptance.rate:.3f} over {finding.requests} requests"


def _acceptance_of(segments: Iterable[SegmentChange]) -> str:
    return ACCEPTANCE[combined(change.after.positions for change in segments)]


def _change_text(change: SegmentChange) -> str:
    after = change.after
    interval = f"{after.low:.3f} to {after.high:.3f}, {after.requests} requests"
    told = change.adjusted
    if told is None:
        return f"    segment {change.segment}: {change.before.rate:.3f} -> {after.rate:.3f} ({interval})"
    line = f"    segment {change.segment}: {told.before:.3f} -> {told.after:.3f} per request of its length"
    counted = f"as counted {change.before.rate:.3f} -> {after.rate:.3f} ({interval})"
    because = f", because {' and '.join(told.because)}" if told.counted_differs and told.because else ""
    return f"{line}; {counted}{because}"


def _summary(running: Replay) -> Iterator[str]:
    count = f"{len(running.streams)} stream{'' if len(running.streams) == 1 else 's'}"
    yield f"{running.records} records, {running.probes} of them probes, {count}"
    for watched in running.streams.values():
        summary = describe(running.config, watched.state)
        yield f"{_stream_text(watched)}: {summary.verdict.replace('_', ' ')}"
        yield f"    sessions: {summary.sessions}{_SESSIONS_MEAN[summary.sessions]}"
        if summary.windows_after_gap:
            yield f"    {summary.windows_after_gap} windows after a restart or a missed scrape left out"
        for segment in summary.segments:
            recent = f"{segment.recent.rate:.3f}" if segment.recent else "none"
            acceptance = ACCEPTANCE[segment.recent.positions if segment.recent else "all"]
            if segment.baseline is None:
                told = f"at least {segment.requests_needed} more {segment.unit} needed, {acceptance} {recent}"
            else:
                told = f"{segment.verdict}, {acceptance} {segment.baseline.rate:.3f} at first, now {recent}"
            yield f"    segment {segment.segment}: {segment.requests} {segment.unit}, {told}"
            if segment.variance_inflation > 1.0:
                yield f"        not independent: {segment.variance_inflation:.1f} times the variance"
            for one in segment.follows:
                yield f"        depends on {one.text}"
            if segment.length_of_acceptance:
                yield "        answer length is not used: it follows from acceptance"
            if segment.learning is not None:
                yield f"        not watched: {in_words(segment.learning)}"
            elif segment.expected_delays:
                yield f"        expected delay: {'; '.join(delay.text for delay in segment.expected_delays)}"


def _stream_text(watched: Watched) -> str:
    key = watched.key
    return f"{key.server} {key.target} with {watched.draft} ({key.draft_version}, {key.method})"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

"""One batch of records inside its transaction: read the states, fold the records, decide what follows, store.

What one stream raises stays with that stream: it undoes what was stored of it, and nothing else. All streams
are folded together, and those in which nothing was found are stored together. Only where that raises are they
taken one by one, which shows whose failure it is. A statement that takes too long may be the stream's own, or
the database's, slow for everybody: it is held against the stream only where others are stored in time.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import attrgetter

import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from driftguard.detection import (
    AlarmWithheld,
    BaselineReady,
    BaselineSettled,
    DetectorConfig,
    DriftClosed,
    DriftOpened,
    DriftSeenGradual,
    DriftWidened,
    Finding,
    Fleet,
    Folded,
    ObservationBatch,
    ProfileLearned,
    StreamState,
    fold_fleet,
    fold_many,
)
from driftguard.incidents import opening, silent
from driftguard.incidents.target_replaced import note_baseline
from driftguard.pipeline import operator_decisions
from driftguard.pipeline.operator_decisions import Decided
from driftguard.pipeline.state_cache import StateCache
from driftguard.records.positions import first_counts, per_position
from driftguard.settings import FalseAlarmScope
from driftguard.status import streams_in_service
from driftguard.store import incidents, streams
from driftguard.store.database import FOLD, is_database_failure, is_too_slow
from driftguard.store.folding import StoredRecord, is_another_in_time
from driftguard.store.tables import Stream

AfterFold = Callable[[Session, Stream, Sequence[StoredRecord], Sequence[Finding]], None]
Records = Mapping[int, Sequence[StoredRecord]]  # by stream
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Rules:
    """What an incident is. `scope`: what A of the config is for, each stream or all of them together.
    `after_fold`: called for each stream, with its records (probes too) and findings, in the transaction."""

    config: DetectorConfig
    scope: FalseAlarmScope
    after_fold: tuple[AfterFold, ...]


class TookTooLong(Exception):
    """A statement of this stream alone took longer than the fold waits."""

    def __init__(self) -> None:
        super().__init__(f"a statement took longer than {FOLD.statement_seconds:g} s")


class Failures(dict[int, Exception]):
    """Stream id -> what it raised. A failure of the database is nobody's own: it is raised.

    `was_late`: whether a statement took too long, of one stream or of several together."""

    def __init__(self) -> None:
        super().__init__()
        self.was_late = False
        self._late = 0  # streams whose own statement took too long,
        self._stored = 0  # and those that were stored one by one

    @contextmanager
    def of(self, stream_id: int) -> Iterator[None]:
        """For what stores nothing."""
        try:
            yield
        except Exception as error:
            if is_database_failure(error):
                raise
            self[stream_id] = error

    @contextmanager
    def alone(self, session: Session, stream_id: int) -> Iterator[None]:
        """In a savepoint."""
        with self.of(stream_id):
            try:
                with session.begin_nested():
                    yield
            except DBAPIError as error:
                if not is_too_slow(error):
                    raise
                self.was_late = True
                self._late += 1
                if self._late > max(1, self._stored) or not is_another_in_time(session, stream_id):
                    raise
                raise TookTooLong from error

    def together(
        self, session: Session, stream_ids: Sequence[int], store: Callable[[Sequence[int]], None]
    ) -> None:
        """Stores what these streams have in one savepoint, as it costs two statements; in one for each where
        that raises, or takes too long."""
        if len(stream_ids) > 1:
            try:
                with session.begin_nested():
                    store(stream_ids)
            except Exception as error:
                if is_too_slow(error):
                    self.was_late = True
                    log.warning("streams took too long together, and are stored one by one", error=str(error))
                elif is_database_failure(error):
                    raise
            else:
                return
        # In any order: where two are at fault, they are not always the first ones.
        for stream_id in random.sample(stream_ids, len(stream_ids)):
            with self.alone(session, stream_id):
                store([stream_id])
            self._stored += stream_id not in self


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is in the transaction: of the streams that failed, nothing."""

    changed: dict[int, Folded]
    described: set[int]
    failures: Failures


def fold_batch(
    session: Session,
    rules: Rules,
    states: StateCache,
    records: Records,
    known: Mapping[int, Stream],
    *,
    fold: int,
    wanted: Collection[int] = (),
) -> Outcome:
    """Folds the records and stores what comes of it. `fold`: its number. `wanted`: streams to describe."""
    failures = Failures()
    before = _read(session, states, records, failures)
    changed = _fold(session, rules, before, records, failures)
    described = states.due(changed, wanted)

    def decide_and_store(stream_ids: Sequence[int]) -> None:
        for stream_id in stream_ids:
            if before[stream_id].superseded:
                operator_decisions.carry_out(session, before[stream_id])
            _decide(session, rules, known[stream_id], changed[stream_id], records[stream_id])
        states.store(session, {each: changed[each] for each in stream_ids}, described, fold)

    quiet = [each for each, folded in changed.items() if not folded.findings]
    failures.together(session, quiet, decide_and_store)
    for stream_id, folded in changed.items():
        if folded.findings:
            failures.together(session, [stream_id], decide_and_store)

    others = [each for each in described if each not in records]
    states.load(session, others, failures.of)
    failures.together(
        session,
        [each for each in others if each not in failures],
        lambda stream_ids: states.describe(session, stream_ids, described),
    )
    return Outcome(
        {each: folded for each, folded in changed.items() if each not in failures},
        {each for each in described if each not in failures},
        failures,
    )


def _read(session: Session, states: StateCache, records: Records, failures: Failures) -> dict[int, Decided]:
    """The states before their records, and what operators decided about them since."""
    in_order = sorted(records)  # in which the ingest locks streams too: those that begin anew are changed
    states.load(session, in_order, failures.of)
    decided = {}
    for stream_id in (each for each in in_order if each not in failures):
        state = states[stream_id]
        if not any(state.incidents):
            decided[stream_id] = Decided(state)
            continue
        with failures.alone(session, stream_id):
            decided[stream_id] = operator_decisions.decided(session, stream_id, state)
    return decided


def _fold(
    session: Session, rules: Rules, before: Mapping[int, Decided], records: Records, failures: Failures
) -> dict[int, Folded]:
    in_service = (
        streams_in_service.gather(session, streams.all_streams(session)) if rules.scope == "fleet" else None
    )
    states = {stream_id: each.state for stream_id, each in before.items()}
    try:
        return _together(rules.config, in_service, states, records)
    except Exception as error:  # noqa: BLE001 (told of the streams whose it is)
        log.warning("a batch could not be folded at once; its streams are taken one by one", error=str(error))
    found: dict[int, Folded] = {}
    for stream_id, state in states.items():
        with failures.of(stream_id):
            found.update(_together(rules.config, in_service, {stream_id: state}, records))
    return found


def _together(
    config: DetectorConfig, in_service: Fleet | None, states: Mapping[int, StreamState], records: Records
) -> dict[int, Folded]:
    traffic = sorted(
        (record for stream_id in states for record in records[stream_id] if record.kind != "probe"),
        key=attrgetter("seq"),
    )  # canary probes are no traffic
    by_stream = _observations(traffic).parted([record.stream_id for record in traffic])
    none = _observations([])
    batches = {stream_id: by_stream.get(stream_id, none) for stream_id in states}
    if in_service is not None:
        return fold_fleet(config, in_service, states, batches)
    folded = fold_many(config, list(states.values()), list(batches.values()))
    return {stream_id: Folded(*each, 1.0) for stream_id, each in zip(states, folded, strict=True)}


def _decide(
    session: Session, rules: Rules, stream: Stream, folded: Folded, records: Sequence[StoredRecord]
) -> None:
    """What follows from the findings: incidents open and end, and what was learned is noted."""
    now = datetime.now(UTC)
    for finding in folded.findings:
        if isinstance(finding, DriftOpened):
            opening.open_incident(session, *opening.from_finding(stream, finding, now, folded.factor))
        elif isinstance(finding, DriftWidened):
            opening.widen(session, stream, finding, now)
        elif isinstance(finding, DriftSeenGradual):
            opening.tell_gradual(session, stream, finding, now)
        elif isinstance(finding, DriftClosed):
            _close(session, stream, folded.state, finding, now)
        elif isinstance(finding, AlarmWithheld):
            log.warning(
                "alarm withheld: the mean of the requests did not move that way",
                stream=stream.id,
                direction=finding.direction,
                record=finding.ordinal,
            )
        else:
            _log_learned(stream, finding)
    if ready := [finding for finding in folded.findings if isinstance(finding, BaselineReady)]:
        streams.forget_beginning(session, stream.id)
        for finding in ready:
            note_baseline(session, stream, finding)
    for hook in rules.after_fold:
        hook(session, stream, records, folded.findings)


def _close(session: Session, stream: Stream, state: StreamState, finding: DriftClosed, now: datetime) -> None:
    """A fall of segments that are silent waits where it may go on in one that is not known yet."""
    young = [name for code, name in enumerate(state.names) if state.newest_baseline(code) is None]
    for incident in incidents.unresolved_of(session, stream.id, finding.direction):
        is_silent = finding.reason == "no_traffic" and finding.direction == "down"
        if not (is_silent and silent.wait(session, incident, young, finding.ordinal, now)):
            opening.close(session, incident, finding, now)


def _log_learned(stream: Stream, finding: ProfileLearned | BaselineSettled | BaselineReady) -> None:
    of_stratum = log.bind(stream=stream.id, segment=finding.segment, stratum=finding.stratum)
    if isinstance(finding, ProfileLearned):
        of_stratum.info(
            "profile learned", factor=finding.factor, cycles=finding.cycles, amplitude=finding.amplitude
        )
    elif isinstance(finding, BaselineSettled):
        of_stratum.info("baseline settled", requests=finding.requests)
    else:
        of_stratum.info("baseline ready", requests=finding.requests, reason=finding.why.reason.value)


def _observations(traffic: Sequence[StoredRecord]) -> ObservationBatch:
    return ObservationBatch.of(
        [record.seq for record in traffic],
        [record.segment for record in traffic],
        [record.drafted for record in traffic],
        [record.accepted for record in traffic],
        [record.ended_at.timestamp() for record in traffic],
        session=[record.session for record in traffic],
        kind=[record.kind for record in traffic],
        num_speculative_tokens=[record.num_speculative_tokens for record in traffic],
        acceptance_rule=[record.acceptance_rule for record in traffic],
        verification=[record.verification for record in traffic],
        temperature=[record.temperature for record in traffic],
        output_tokens=[record.output_tokens for record in traffic],
        started_at=[record.started_at.timestamp() for record in traffic],
        prompt_tokens=[record.prompt_tokens for record in traffic],
        cached_tokens=[record.cached_tokens for record in traffic],
        concurrency=[record.concurrency for record in traffic],
        started_requests=[record.started_requests for record in traffic],
        first_position=[
            first_counts(
                record.kind, _first(record.drafted_per_position), _first(record.accepted_per_position)
            )
            for record in traffic
        ],
    )


@dataclass(slots=True)
class Counts:
    """Of several records. `positions`: place in a draft, from 1 -> drafted, accepted."""

    records: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    positions: dict[int, tuple[int, int]] = field(default_factory=dict)


def counted(records: Sequence[StoredRecord]) -> dict[tuple[int, str, str], Counts]:
    """By stream, segment and kind."""
    totals: dict[tuple[int, str, str], Counts] = defaultdict(Counts)
    for record in records:
        counts = totals[record.stream_id, record.segment, record.kind]
        counts.records += 1
        counts.steps += record.steps
        counts.drafted += record.drafted
        counts.accepted += record.accepted
        counts.emitted += record.emitted
        told = per_position(record.steps, record.drafted_per_position, record.accepted_per_position)
        for position, (drafted, accepted) in enumerate(told, start=1):
            before = counts.positions.get(position, (0, 0))
            counts.positions[position] = (before[0] + drafted, before[1] + accepted)
    return totals


def _first(counts: Sequence[int] | None) -> int | None:
    return counts[0] if counts else None

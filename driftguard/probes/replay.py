"""One replay of a server's canary prompts, from the stored set to stored records. A server without a set gets
the usual one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from driftguard.errors import BadInput
from driftguard.probes.answers import Answer, ProbeFailed
from driftguard.probes.prompts import Prompt
from driftguard.probes.server import ProbedServer, Serving
from driftguard.probes.usual_prompts import usual_set
from driftguard.records import AcceptanceRecord, RecordError, check_record, new_record_id
from driftguard.records.probe_session import parse, session_of
from driftguard.settings import ProbeSettings, ProbeTargetSettings
from driftguard.store import probe_prompts
from driftguard.store.database import Database
from driftguard.store.probe_lock import replaying
from driftguard.store.probe_prompts import StoredPrompt
from driftguard.store.records import insert_batches
from driftguard.store.streams import StreamRegistry


@dataclass(frozen=True, slots=True)
class Replay:
    """What one replay measured."""

    server: str
    draft_version: str
    prompts: int
    requests: int
    drafted: int
    accepted: int

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None


def replay(
    database: Database,
    target: ProbeTargetSettings,
    rules: ProbeSettings,
    sleep: Callable[[float], object] = time.sleep,
    should_stop: Callable[[], bool] = lambda: False,
    max_streams: int | None = None,
    *,
    is_given: bool = True,
    on_ask: Callable[[], object] = lambda: None,
) -> Replay | None:
    """Asks every prompt, and once more at once (`ask_twice`), with a pause after each; stores all or none.
    `is_given`: no need to find out first whether this is a server to be asked. `on_ask`: called right before
    a prompt is sent.

    None if it was stopped. Raises BadInput (the stream is not known yet), ProbeFailed (the server), Conflict
    (another process is at it), DatabaseUnavailable.
    """
    limits = {"max_tokens": rules.max_tokens, "timeout_seconds": rules.timeout_seconds}
    with (
        replaying(database, target.server),
        ProbedServer(target, **limits, on_ask=on_ask) as server,  # type: ignore[arg-type]
    ):
        if not is_given:
            server.require_known_engine()
        serving = _serving(database, server, target.server)

        def may_go_on() -> bool:
            sleep(rules.pause_seconds)
            return not should_stop()

        prompts = _prompts(database, server, target.server, may_go_on)
        if prompts is None:
            return None
        records: list[AcceptanceRecord] = []
        for prompt in prompts:
            for is_warm in (False, True) if rules.ask_twice else (False,):
                started_at = datetime.now(UTC)
                asked = _Asked(prompt, server.ask(prompt), started_at, is_warm)
                records.append(_record(target.server, serving, asked, server.url))
                if not may_go_on():
                    return None
        if _serving(database, server, target.server) != serving:
            raise ProbeFailed(
                f"{server.url}: another draft was put into service during the replay; replay again"
            )
    with database.session() as session:
        (stored,) = insert_batches(session, [records], StreamRegistry(max_streams), datetime.now(UTC))
    if refusals := stored.refusals(records):
        raise ProbeFailed(refusals[0][1])
    return _summed(target.server, serving, records)


def _prompts(
    database: Database, server: ProbedServer, name: str, may_go_on: Callable[[], bool]
) -> list[Prompt] | None:
    """Those that are kept; else the usual ones, which are kept from now on."""
    with database.session() as session:
        kept = [Prompt(*stored) for stored in probe_prompts.of_server(session, name)]
    if kept:
        return kept
    usual = usual_set(server, may_go_on)
    if usual is None:
        return None
    with database.session() as session:
        stored = [StoredPrompt(prompt.key, prompt.segment, prompt.body) for prompt in usual]
        probe_prompts.replace(session, name, stored, datetime.now(UTC))
    return usual


def _serving(database: Database, server: ProbedServer, name: str) -> Serving:
    if (told := server.serving()) is not None:
        return told
    with database.session() as session:
        stream = probe_prompts.newest_stream(session, name)
        if stream is None:
            raise BadInput(
                f"no records of {name} have arrived yet, so its draft is not known; send "
                "its traffic's records first"
            )
        return Serving(stream.target, stream.draft, stream.draft_version, stream.method)


@dataclass(frozen=True, slots=True)
class _Asked:
    """`is_warm`: right after the same prompt, so that the server has its beginning in the prefix cache."""

    prompt: Prompt
    answer: Answer
    started_at: datetime
    is_warm: bool


def _record(name: str, serving: Serving, asked: _Asked, url: str) -> AcceptanceRecord:
    told = asked.answer.told
    record = AcceptanceRecord(
        record_id=new_record_id(),
        kind="probe",
        started_at=asked.started_at,
        ended_at=datetime.now(UTC),
        server=name,
        target=serving.target,
        draft=serving.draft,
        draft_version=serving.draft_version,
        method=serving.method,
        segment=asked.prompt.segment,
        session=session_of(asked.prompt.key, asked.answer.text, is_warm=asked.is_warm),
        steps=told.steps,
        drafted=told.drafted,
        accepted=told.accepted,
        emitted=told.emitted,
        accepted_per_position=told.accepted_per_position,
        num_speculative_tokens=told.num_speculative_tokens,
        acceptance_rule="greedy",
        verification="greedy",
        temperature=0.0,
        prompt_tokens=told.prompt_tokens,
        cached_tokens=told.cached_tokens,
        output_tokens=told.output_tokens,
        time_to_first_token_seconds=told.time_to_first_token_seconds,
        time_per_output_token_seconds=told.time_per_output_token_seconds,
        fidelity="request",
    )
    try:
        check_record(record)
    except RecordError as error:
        raise ProbeFailed(f"{url}: its numbers contradict each other: {error}") from None
    return record


def _summed(name: str, serving: Serving, records: Sequence[AcceptanceRecord]) -> Replay:
    return Replay(
        server=name,
        draft_version=serving.draft_version,
        prompts=sum(not parse(record.session or "").is_warm for record in records),
        requests=len(records),
        drafted=sum(record.drafted for record in records),
        accepted=sum(record.accepted for record in records),
    )

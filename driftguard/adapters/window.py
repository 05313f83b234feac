"""The counts of one server between two scrapes, and the acceptance record made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from driftguard.adapters.condition import Condition
from driftguard.records import AcceptanceRecord, Fidelity, check_record, new_record_id


class Incomplete(ValueError):
    """{what is missing}: a label, or a setting for a value that the metrics lack; the message names it"""


class LeftOut(ValueError):
    """{why}: the counts since the previous scrape cannot be one window"""


@dataclass(frozen=True, slots=True)
class Identity:
    """The settings of a server. None: as its metrics say, else 'unknown'."""

    server: str
    target: str | None = None
    draft: str | None = None
    draft_version: str | None = None
    method: str | None = None
    segment: str = "default"
    num_speculative_tokens: int | None = None


class Drafted(NamedTuple):
    """What a server drafted with last, as its records say. Some name it only while they speculate."""

    draft: str
    method: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Counts of one target between two scrapes. `target`, `draft`, `draft_version`, `method`, `segment`: None
    if its metrics do not say."""

    target: str | None
    begun_at: datetime
    ended_at: datetime
    steps: int
    drafted: int
    accepted: int
    generated: int | None  # tokens, with and without speculation; None: unknown
    fidelity: Fidelity
    speculated_before: bool  # at any time since the server started
    drafted_per_position: list[int] | None = None
    accepted_per_position: list[int] | None = None
    num_speculative_tokens: int | None = None
    prompt_tokens: int | None = None
    time_to_first_token_seconds: float | None = None
    time_per_output_token_seconds: float | None = None
    concurrency: int | None = None
    counts_drafts: bool = True  # else its metrics have no counters of drafts, as without speculation
    is_stalled: bool = False  # requests ran at both ends, and of none a token was counted
    waiting_requests: int | None = None
    started_requests: int | None = None  # that gave their first token
    draft: str | None = None
    draft_version: str | None = None
    method: str | None = None
    segment: str | None = None
    precision: str = ""  # of its counts, in words, where they are printed rounded
    goes_on: bool = False  # its counts are too few to be exact enough: the next reading belongs to it as well

    @property
    def condition(self) -> Condition:
        if self.drafted:
            return "reporting"
        if not self.counts_drafts:
            return "not_speculating"
        if not self.generated:
            return "stalled" if self.is_stalled else "idle"
        if self.goes_on:
            return "reporting"
        return "drafting_stopped" if self.speculated_before else "not_speculating"

    def record(self, known: Identity) -> AcceptanceRecord:
        """Raises Incomplete: neither the server nor the settings name the target; RecordError: the counts
        contradict each other, which happens if a server updates its counters while it prints them."""
        target = known.target or self.target
        if target is None:
            raise Incomplete("the server does not name its model; set `target`")
        record = AcceptanceRecord(
            record_id=new_record_id(),
            kind="window",
            started_at=self.begun_at,
            ended_at=self.ended_at,
            server=known.server,
            target=target,
            draft=known.draft or self.draft or "unknown",
            draft_version=known.draft_version or self.draft_version or "unknown",
            method=known.method or self.method or "unknown",
            segment=self.segment or known.segment,
            steps=self.steps,
            drafted=self.drafted,
            accepted=self.accepted,
            emitted=self.accepted + self.steps,
            fidelity=self.fidelity,
            drafted_per_position=self.drafted_per_position,
            accepted_per_position=self.accepted_per_position,
            num_speculative_tokens=self.num_speculative_tokens,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.generated,
            time_to_first_token_seconds=self.time_to_first_token_seconds,
            time_per_output_token_seconds=self.time_per_output_token_seconds,
            concurrency=self.concurrency,
            waiting_requests=self.waiting_requests,
            started_requests=self.started_requests,
        )
        check_record(record)
        return record


def condition_of(windows: Sequence[Window]) -> Condition:
    """The condition of a server with several targets: the most informative one."""
    found = {window.condition for window in windows}
    order: tuple[Condition, ...] = ("reporting", "drafting_stopped", "stalled", "idle", "not_speculating")
    return next((condition for condition in order if condition in found), "not_speculating")

"""What one server counted between two scrapes, and how it becomes an acceptance record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from driftguard.adapters.condition import Condition
from driftguard.records import AcceptanceRecord, Fidelity, check_record, new_record_id


class Incomplete(ValueError):
    """{what is missing}: a label, or a setting that the metrics do not replace, named in the message"""


class LeftOut(ValueError):
    """{why}: what was counted since the scrape before belongs to no one window"""


@dataclass(frozen=True, slots=True)
class Identity:
    """What the settings say of a server. None: as the server tells, else 'unknown'."""

    server: str
    target: str | None = None
    draft: str | None = None
    draft_version: str | None = None
    method: str | None = None
    segment: str = "default"
    num_speculative_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Counts of one target between two scrapes. `target`, `draft`, `draft_version`, `method`, `segment`: None
    where the server does not tell."""

    target: str | None
    begun_at: datetime
    ended_at: datetime
    steps: int
    drafted: int
    accepted: int
    generated: int | None  # tokens, with and without speculation; None: not told
    fidelity: Fidelity
    speculated_before: bool  # ever since the server started
    drafted_per_position: list[int] | None = None
    accepted_per_position: list[int] | None = None
    num_speculative_tokens: int | None = None
    prompt_tokens: int | None = None
    time_to_first_token_seconds: float | None = None
    time_per_output_token_seconds: float | None = None
    concurrency: int | None = None
    draft: str | None = None
    draft_version: str | None = None
    method: str | None = None
    segment: str | None = None

    @property
    def condition(self) -> Condition:
        if self.drafted:
            return "reporting"
        if not self.generated:
            return "idle"
        return "drafting_stopped" if self.speculated_before else "not_speculating"

    def record(self, known: Identity) -> AcceptanceRecord:
        """Raises Incomplete: nobody names the target; RecordError: the counts contradict each other, which
        happens where a server updates its counters while it prints them."""
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
        )
        check_record(record)
        return record


def condition_of(windows: Sequence[Window]) -> Condition:
    """Of a server with several targets: the most telling of theirs."""
    found = {window.condition for window in windows}
    order: tuple[Condition, ...] = ("reporting", "drafting_stopped", "idle", "not_speculating")
    return next((condition for condition in order if condition in found), "not_speculating")

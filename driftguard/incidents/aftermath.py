"""How long a resolved incident lasted, when it was detected and mitigated, what it cost. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from driftguard.detection.findings import duration
from driftguard.records.documents.cost import Interval
from driftguard.store.tables import Incident


@dataclass(frozen=True, slots=True)
class Aftermath:
    """Of a resolved incident, from the change point on.

    detected_after_seconds: None where the source's clock is ahead of the sidecar's, so that it is not known.
    mitigated_after_seconds: to the promotion of the draft that helped, or until acceptance was found back;
    None where nothing shows that it helped. tokens: emitted in the changed segments until the end; None of
    an incident that an earlier version resolved. tokens_lost: those that would have been emitted beyond them
    in the same decoding time at the speed before; None where the slowdown is not known, and of a rise.
    basis: of the slowdown.
    """

    lasted_seconds: float
    detected_after_seconds: float | None
    mitigated_after_seconds: float | None
    tokens: int | None
    tokens_lost: Interval | None
    basis: Literal["measured", "formula"] | None
    text: str


@dataclass(frozen=True, slots=True)
class HalfRecovery:
    """When a promoted draft was shown to have won back half of the fall in every changed segment that is
    judged, by the same bets as a recovery: since the incident was opened, that is, since the move was
    confirmed, and since the draft came into service."""

    since_confirmed_seconds: float
    since_promoted_seconds: float

    @property
    def text(self) -> str:
        return (
            f"half of the fall was won back {duration(self.since_confirmed_seconds)} after it was confirmed, "
            f"{duration(self.since_promoted_seconds)} after the promotion"
        )


def half_recovery(incident: Incident) -> HalfRecovery | None:
    """None where it is not shown."""
    told = incident.evidence.mitigation
    if told is None or told.half_at is None or told.promoted_at is None:
        return None
    seconds = (max((told.half_at - at).total_seconds(), 0.0) for at in (incident.opened_at, told.promoted_at))
    return HalfRecovery(*seconds)


def of(incident: Incident) -> Aftermath | None:
    """None while it is open.

    tokens_lost = tokens x lost / (1 - lost), lost: the part of the tokens per second. The time in which they
    were generated would have given tokens / (1 - lost) at the speed before.
    """
    if incident.resolved_at is None:
        return None
    ending = incident.evidence.ending
    detected = _seconds(incident.change_point_at, incident.opened_at)
    mitigated = _since(incident, ending.mitigated_at) if ending and ending.mitigated_at else None
    lost, basis = _lost(incident)
    tokens = ending.tokens if ending else None
    tokens_lost = None
    if tokens is not None and lost is not None:
        tokens_lost = Interval(*(tokens * part / (1.0 - part) for part in (lost.value, lost.low, lost.high)))
    lasted = _since(incident, incident.resolved_at)
    text = _times(lasted, detected, mitigated)
    if (half := half_recovery(incident)) is not None:
        text += f"; {half.text}"
    if incident.direction != "up":
        text += f"; {_cost(tokens_lost, basis)}"
    text += "."
    return Aftermath(lasted, detected, mitigated, tokens, tokens_lost, basis, text)


def _since(incident: Incident, end: datetime) -> float:
    """From the change point, by the source's clock; where that is ahead of `end`, from the opening."""
    return _seconds(incident.change_point_at, end) or _seconds(incident.opened_at, end) or 0.0


def _seconds(start: datetime, end: datetime) -> float | None:
    """None where the end lies before the start."""
    seconds = (end - start).total_seconds()
    return seconds if seconds >= 0.0 else None


def _lost(incident: Incident) -> tuple[Interval | None, Literal["measured", "formula"] | None]:
    evidence = incident.evidence
    part = evidence.slowdown
    if incident.direction == "up" or part is None or not 0.0 <= part < 1.0:
        return None, None
    if evidence.goodput is not None and evidence.goodput.kind == "speculation_loses":
        return None, None  # only at some of the loads that there were
    lost = evidence.cost.lost if evidence.cost else None
    if evidence.slowdown_measured is not None and lost is not None and lost.high < 1.0:
        return lost, "measured"
    by_formula = evidence.slowdown_measured is None and evidence.goodput is None
    basis: Literal["measured", "formula"] = "formula" if by_formula else "measured"
    return Interval(part, part, part), basis


def _times(lasted: float, detected: float | None, mitigated: float | None) -> str:
    return "; ".join(
        [
            f"It lasted {duration(lasted)}",
            _UNKNOWN_DETECTION if detected is None else f"detected after {duration(detected)}",
            _NOT_MITIGATED if mitigated is None else f"mitigated after {duration(mitigated)}",
        ]
    )


def _cost(tokens: Interval | None, basis: str | None) -> str:
    if tokens is None:
        return "what it cost in tokens is not known"
    between = f" ({tokens.low:,.0f} to {tokens.high:,.0f})" if tokens.high > tokens.low else ""
    how = "measured" if basis == "measured" else "by formula"
    return f"it cost about {tokens.value:,.0f} tokens{between}, {how}"


_UNKNOWN_DETECTION = "when it was detected is not known, as the source's clock is ahead"
_NOT_MITIGATED = "nothing shows that it was mitigated"

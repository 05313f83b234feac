"""What to do about a stream, from its rows: the situation that driftguard.cost.best_action judges. Pure."""

from __future__ import annotations

from driftguard.cost import Cost, Interval
from driftguard.cost.best_action import Action, Situation, actions, rollback_gain
from driftguard.records.documents.incident import IncidentEvidence, Rollback
from driftguard.store.tables import Incident, RetrainRun


def of_stream(cost: Cost | None, incident: Incident | None, rollback: Rollback | None) -> tuple[Action, ...]:
    """Every action in order, one of them the best. `cost`: as last measured; None where it is not known, or
    too old. `incident`: the one that is open, if any."""
    fell = incident is not None and incident.direction != "up" and incident.state != "resolved"
    known = incident.diagnosis if incident is not None and fell else None
    if rollback is None and incident is not None and fell:
        rollback = incident.evidence.rollback
    mitigation = incident.evidence.mitigation if incident is not None and fell else None
    situation = Situation(
        cost=cost,
        lost=_lost(incident) if incident is not None and fell else None,
        cause=known.cause if known else None,
        confidence=known.confidence if known else "low",
        retrain=known.retrain if known else False,
        training=incident is not None and fell and mitigation is None and _is_trained_for(incident),
        watched=mitigation.draft_version if mitigation is not None else None,
        rollback_to=rollback.version if rollback else None,
        rollback_gain=rollback.gain if rollback else None,
        rollback_by_hand=rollback.by_hand if rollback else False,
    )
    return actions(situation)


def of_incident(incident: Incident) -> tuple[Action, ...]:
    """By what the incident itself keeps, which is brought up to date while it is open."""
    return of_stream(incident.evidence.cost, incident, incident.evidence.rollback)


def rollback_of(back: str | None, run: RetrainRun | None, draft: str, cost: Cost | None) -> Rollback | None:
    """`draft`: the version in service; `back`: that to which its rollback returns. `run`: the newest of the
    server and target, whose watch tells both drafts apart where it made this one from that one."""
    if back is None:
        return None
    compares = run is not None and (run.candidate_version, run.parent_version) == (draft, back)
    numbers = run.numbers if run is not None and compares else None
    k = cost.num_speculative_tokens if cost else None
    return Rollback(back, rollback_gain(numbers.watch if numbers else None, float(k) if k else None))


def _is_trained_for(incident: Incident) -> bool:
    return incident.is_left_to_retraining and incident.state != "recovered_in_part"


def _lost(incident: Incident) -> Interval | None:
    """Of the tokens per second of the whole stream: the changed segments have a share of its requests."""
    evidence, share = incident.evidence, _share(incident)
    if evidence.goodput is not None and evidence.goodput.kind == "speculation_loses":
        return None  # nothing was lost that a restart or a draft could give back
    lost = evidence.cost.lost if evidence.cost else None
    if evidence.slowdown_measured is not None and lost is not None:
        return Interval(share * lost.value, share * lost.low, share * lost.high)
    if evidence.slowdown is None:
        return None
    return Interval(*(share * evidence.slowdown for _ in range(3)))


def _share(incident: Incident) -> float:
    """Of the changed segments in the stream's requests since the change; 1 where that is not known."""
    of_all = _requests_after(incident.evidence)
    own = sum(segment.after.requests for segment in incident.segments)
    return min(own / of_all, 1.0) if of_all else 1.0


def _requests_after(evidence: IncidentEvidence) -> int:
    return evidence.stream_after.requests if evidence.stream_after else 0

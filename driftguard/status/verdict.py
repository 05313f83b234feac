"""The verdict of each stream, by which a fleet of any size is counted, sorted and searched. Little is read
for each stream; the numbers behind the verdict are read only for streams that are shown (gather.py)."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import accumulate
from typing import Final

from sqlalchemy.orm import Session

from driftguard.incidents.cost_measurement import OUTDATED_AFTER
from driftguard.incidents.target_replaced import IN_SERVICE_WITHIN
from driftguard.status.staleness import SURELY_STALE, Newest, depends_on_usual_silence, is_stale
from driftguard.status.usual_silence import ActiveSource, Place, UsualSilences
from driftguard.store import folding, sources, status_queries, stream_costs, streams
from driftguard.store.streams import StreamRow
from driftguard.store.tables import HeldStream, Incident, Source

WORST_FIRST: Final = (
    "degraded",
    "cannot_be_judged",
    "stale",
    "drafting_stopped",
    "speculation_loses",
    "improved",
    "watching",
    "relearning",
    "insufficient_data",
    "steady",
    "replaced",
)

_TOLD_BEFORE_GOODPUT: Final = ("degraded", "cannot_be_judged", "drafting_stopped")
_RANK: Final = {verdict: rank for rank, verdict in enumerate(WORST_FIRST)}


@dataclass(frozen=True, slots=True)
class Standing:
    """The current verdict of one stream: the worst of what its acceptance, its speed and its source say.
    `verdict` is "stale" if its source is silent, whatever it was before."""

    stream: StreamRow
    verdict: str
    known_verdict: str  # without regard to a silence of its source
    acceptance_verdict: str  # nor to goodput, and whether speculation pays
    incident: Incident | None  # the reason of the verdict
    set_aside: HeldStream | None
    in_service: bool
    target_in_service: str  # another one than the stream's where it took its place on the server
    draft_in_service: str
    heard: Newest | None  # of its source, where that has sent any but canary probes

    @property
    def rank(self) -> int:
        """0 is the worst."""
        return _RANK[self.verdict]


def standings(
    session: Session,
    now: datetime,
    known: Sequence[StreamRow] | None = None,
    scraped: Sequence[Source] | None = None,
    usual: UsualSilences | None = None,
) -> list[Standing]:
    """Of every stream, the worst of those in service first, then by name. `known`: all, or all of some
    servers; `scraped`: all; each if the caller has already read them. `usual`: the cache of
    earlier calls."""
    known = streams.all_streams(session) if known is None else known
    scraped = sources.all_sources(session) if scraped is None else scraped
    heard = _newest_by_source(known)
    audible = _audible(known, heard, sources.quiet_servers(scraped, now))
    drafts = status_queries.drafts_in_service(session)
    newest = _newest(known)
    unresolved = status_queries.unresolved_incidents(session)
    silent = _silent(session, audible, now, usual or UsualSilences())
    fallen = {(stream.server, stream.target) for stream in known if stream.id in unresolved}
    taken = _taken(known, newest)
    taken |= _outlived(newest, heard, silent - fallen - taken.keys())
    facts = _Facts(
        newest=newest,
        taken=taken,
        serving=_serving(known, drafts, newest, taken),
        told=folding.verdicts(session),
        incidents=unresolved,
        drafts=drafts,
        set_aside=folding.set_aside(session),
        watched=folding.watched_versions(session),
        losing=stream_costs.losing(session, OUTDATED_AFTER),
        heard=heard,
        silent=silent,
    )
    found = [_standing(stream, facts) for stream in known]
    return sorted(found, key=lambda item: (item.rank, item.stream.server, item.stream.target, item.stream.id))


def in_service(known: Sequence[StreamRow], drafts: Mapping[Place, str]) -> set[int]:
    """Ids of the streams with a recent record, compared with the newest of their server and target, and with
    the draft that was put into service there, if any (`drafts`: (server, target) -> its version). None of a
    target whose place another one took."""
    newest = _newest(known)
    return _serving(known, drafts, newest, _taken(known, newest))


def _serving(
    known: Sequence[StreamRow],
    drafts: Mapping[Place, str],
    newest: Mapping[Place, StreamRow],
    taken: Mapping[Place, StreamRow],
) -> set[int]:
    serving = set()
    for stream in known:
        place = (stream.server, stream.target)
        replaced = stream.method != "none" and drafts.get(place, stream.draft_version) != stream.draft_version
        is_recent = newest[place].last_seen_at - stream.last_seen_at <= IN_SERVICE_WITHIN
        if is_recent and not replaced and place not in taken:
            serving.add(stream.id)
    return serving


def _taken(known: Sequence[StreamRow], newest: Mapping[Place, StreamRow]) -> dict[Place, StreamRow]:
    """Of each place that sends nothing any more since a stream of the same server, draft and method, but with
    another target, began: the newest such stream. Of two targets side by side neither takes a place."""
    alike: dict[tuple[str, str, str], list[StreamRow]] = defaultdict(list)
    for stream in sorted(known, key=lambda stream: stream.first_seen_at):
        alike[stream.server, stream.method, stream.draft_version].append(stream)
    newest_since = {
        key: list(accumulate(reversed(streams), _heard_later))[::-1] for key, streams in alike.items()
    }
    taken: dict[Place, StreamRow] = {}
    for place, last in newest.items():
        key = last.server, last.method, last.draft_version
        begun = bisect_left(
            alike[key], last.last_seen_at - IN_SERVICE_WITHIN, key=lambda one: one.first_seen_at
        )
        # The place's own streams are no newer than its newest one.
        for later in newest_since[key][begun : begun + 1]:
            if later.last_seen_at > last.last_seen_at + IN_SERVICE_WITHIN:
                taken[place] = later
    return taken


def _outlived(
    newest: Mapping[Place, StreamRow], heard: Mapping[Place, Newest], silent: set[Place]
) -> dict[Place, StreamRow]:
    """Of each of these `silent` places that was served beside one of the same server, draft and method, which
    was heard more than a week later: the one heard last. A silence that long is no pause of a night or a
    weekend. It may still be one, say between two batches: so a place with an open incident, which would end
    with it, is none of `silent`."""
    last: dict[tuple[str, str, str], Place] = {}
    for place, stream in newest.items():
        key = stream.server, stream.method, stream.draft_version
        if place in heard and (key not in last or heard[place].arrived_at > heard[last[key]].arrived_at):
            last[key] = place
    outlived: dict[Place, StreamRow] = {}
    for place in silent:
        stream = newest[place]
        other = last[stream.server, stream.method, stream.draft_version]
        if heard[other].arrived_at - heard[place].arrived_at > SURELY_STALE:
            outlived[place] = newest[other]
    return outlived


def _heard_later(one: StreamRow, other: StreamRow) -> StreamRow:
    return other if other.last_seen_at > one.last_seen_at else one


def _newest(known: Sequence[StreamRow]) -> dict[Place, StreamRow]:
    """(server, target) -> the stream with the newest record."""
    newest: dict[Place, StreamRow] = {}
    for stream in known:
        best = newest.setdefault((stream.server, stream.target), stream)
        if stream.last_seen_at > best.last_seen_at:
            newest[stream.server, stream.target] = stream
    return newest


@dataclass(frozen=True, slots=True)
class _Facts:
    newest: dict[Place, StreamRow]
    taken: dict[Place, StreamRow]
    serving: set[int]
    told: dict[int, str]
    incidents: dict[int, dict[str, Incident]]
    drafts: dict[Place, str]
    set_aside: dict[int, HeldStream]
    watched: set[tuple[str, str, str]]  # server, target, version of promoted drafts
    losing: set[int]
    heard: dict[Place, Newest]
    silent: set[Place]


def _newest_by_source(known: Sequence[StreamRow]) -> dict[Place, Newest]:
    """(server, target) -> its newest record that is not a canary probe; sources without one are left out."""
    heard: dict[Place, Newest] = {}
    for stream in known:
        if stream.traffic_arrived_at is None or stream.traffic_ended_at is None:
            continue
        found = Newest(stream.traffic_arrived_at, stream.traffic_ended_at)
        best = heard.setdefault((stream.server, stream.target), found)
        if (found.arrived_at, found.ended_at) > (best.arrived_at, best.ended_at):
            heard[stream.server, stream.target] = found
    return heard


def _audible(
    known: Sequence[StreamRow], heard: Mapping[Place, Newest], quiet: set[str]
) -> dict[Place, ActiveSource]:
    """The sources that may have stopped sending. `quiet`: servers that are known to have nothing to send."""
    streams_of: dict[Place, list[int]] = defaultdict(list)
    for stream in known:
        streams_of[stream.server, stream.target].append(stream.id)
    return {
        place: ActiveSource(newest, tuple(sorted(streams_of[place])))
        for place, newest in heard.items()
        if place[0] not in quiet
    }


def _silent(
    session: Session, audible: Mapping[Place, ActiveSource], now: datetime, usual: UsualSilences
) -> set[Place]:
    """The sources that have stopped sending (staleness.py)."""
    asked = {place: each for place, each in audible.items() if depends_on_usual_silence(each.newest, now)}
    known = usual.of(session, asked)
    return {
        place for place, each in audible.items() if is_stale(each.newest, now, known.get(place, timedelta()))
    }


def _standing(stream: StreamRow, facts: _Facts) -> Standing:
    place = (stream.server, stream.target)
    serving = stream.id in facts.serving
    told, incidents = facts.told.get(stream.id), facts.incidents.get(stream.id, {})
    verdict, incident = _verdict(told, incidents, in_service=serving)
    if verdict == "insufficient_data" and _is_relearning(stream):
        verdict = "relearning"
    elif verdict == "insufficient_data" and (*place, stream.draft_version) in facts.watched:
        verdict = "watching"
    held = facts.set_aside.get(stream.id) if serving else None
    if held is not None:
        verdict = "cannot_be_judged"
    known = _worse(verdict, "speculation_loses") if serving and stream.id in facts.losing else verdict
    if serving and (slower := incidents.get("slower")) is not None:
        known, incident = _with_goodput(known, incident, slower)
    return Standing(
        stream=stream,
        verdict="stale" if serving and place in facts.silent else known,
        known_verdict=known,
        acceptance_verdict=verdict,
        incident=incident,
        set_aside=held,
        in_service=serving,
        target_in_service=facts.taken[place].target if place in facts.taken else stream.target,
        draft_in_service=facts.drafts.get(place, facts.newest[place].draft_version),
        heard=facts.heard.get(place),
    )


def _with_goodput(known: str, incident: Incident | None, slower: Incident) -> tuple[str, Incident | None]:
    """Slower tokens are told before a level that is fine or not known yet. An open fall of acceptance, a
    detector that fails and drafting that stopped are told before them: they say what to look at first."""
    if known in _TOLD_BEFORE_GOODPUT:
        return known, incident
    goodput = slower.evidence.goodput
    loses = goodput is not None and goodput.kind == "speculation_loses"
    return "speculation_loses" if loses else "degraded", slower


def _worse(one: str, other: str) -> str:
    """A fall that is open is told before a loss, and a loss before a level that is fine or not known yet."""
    return min(one, other, key=_RANK.__getitem__)


def _is_relearning(stream: StreamRow) -> bool:
    return stream.begun_anew_because == "other_version" and stream.method != "none"


def _verdict(
    told: str | None, incidents: dict[str, Incident], *, in_service: bool
) -> tuple[str, Incident | None]:
    """The verdict, and the incident that is its reason. An incident that a person resolved ends at once.
    `told`: the detector's own verdict; None before the first fold."""
    if not in_service:
        return "replaced", None
    if told == "drafting_stopped":
        return "drafting_stopped", incidents.get("down")
    for verdict, direction in (("degraded", "down"), ("improved", "up")):
        if direction in incidents:
            return verdict, incidents[direction]
    if told is None:
        return "insufficient_data", None
    return ("steady" if told in ("degraded", "improved") else told), None

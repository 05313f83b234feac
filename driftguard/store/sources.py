"""The servers whose metrics are scraped or pushed, as they were found last, one row each: every sidecar on
the database shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any, Final, cast

from sqlalchemy import ColumnElement, Delete, case, delete, func, select, update
from sqlalchemy.dialects.postgresql import Insert, insert
from sqlalchemy.orm import Session

from driftguard.adapters.condition import Condition
from driftguard.records import FUTURE_TOLERANCE, Fidelity
from driftguard.store.tables import Record, ServerStart, ServerVersion, Source

PUSHED: Final = "OTLP"  # in place of the address of a scraped server
LATELY: Final = timedelta(minutes=1)
FORGOTTEN_AFTER: Final = timedelta(days=1)  # a server of which nothing is read any more
STALE_INTERVALS: Final = 3
UNREAD_AFTER: Final = timedelta(minutes=5)
SAME_START: Final = timedelta(minutes=1)  # what a start time moves by, as the clock of the machine is set
STARTS_KEPT: Final = timedelta(days=100)


@dataclass(frozen=True, slots=True)
class SourceState:
    """After the newest scrape, or export. `answered_at`: when one could be read last."""

    server: str
    kind: str
    url: str
    fidelity: Fidelity | None
    condition: Condition
    detail: str
    since: datetime  # of the condition
    scraped_at: datetime
    answered_at: datetime | None
    interval_seconds: float
    started_at: datetime | None = None  # of the server's process, where its metrics tell it
    version: str | None = None  # of the engine, where it tells it


def store(session: Session, states: Sequence[SourceState]) -> None:
    """Replaces the rows of these servers, and removes those that were forgotten. Keeps every start, and
    since when each version is known."""
    _replace(session, states, {})
    _note_starts(session, states)
    _note_versions(session, [state for state in states if state.version])
    newest = max(state.scraped_at for state in states)
    session.execute(forgotten(newest))


def forgotten(now: datetime) -> Delete:
    """Removes the servers of which nothing has been read for long, as they are in no settings any more: also
    by the clock of the database, as this one may be ahead."""
    return delete(Source).where(_free(Source.scraped_at < func.least(now, func.now()) - FORGOTTEN_AFTER))


def _free(*conditions: ColumnElement[bool]) -> ColumnElement[bool]:
    """Servers that fulfil these and that nobody stores at this moment. As an export stores several, waiting
    for it could end in a deadlock, and what was just read of a server is newer anyway."""
    found = select(Source.server).where(*conditions)
    return Source.server.in_(found.with_for_update(skip_locked=True))


def store_pushed(session: Session, states: Sequence[SourceState]) -> None:
    """The same without forgetting. `since` stays while the condition does, and `answered_at` where there is
    no newer one: who takes exports does not know what another sidecar took."""
    given = insert(Source).excluded
    kept = {
        "since": case((Source.condition == given.condition, Source.since), else_=given.since),
        "answered_at": func.coalesce(given.answered_at, Source.answered_at),
    }
    _replace(session, states, kept)


def _note_starts(session: Session, states: Sequence[SourceState]) -> None:
    """Stores those that are new, and removes of their servers those that are long past, or told by a clock
    that was ahead."""
    found = {state.server: (state.started_at, state.scraped_at) for state in states if state.started_at}
    newest = select(ServerStart.server, func.max(ServerStart.started_at)).group_by(ServerStart.server)
    known = dict(session.execute(newest.where(ServerStart.server.in_(found))).all())
    for server, (started_at, now) in found.items():
        outdated = ServerStart.started_at < started_at - STARTS_KEPT
        if server in known and started_at < known[server] + SAME_START:
            if started_at > known[server] - SAME_START or known[server] <= now + FUTURE_TOLERANCE:
                continue
            outdated |= ServerStart.started_at > now + FUTURE_TOLERANCE
        session.execute(delete(ServerStart).where(ServerStart.server == server, outdated))
        values = insert(ServerStart).values(server=server, started_at=started_at)
        session.execute(values.on_conflict_do_nothing())


def _note_versions(session: Session, states: Sequence[SourceState]) -> None:
    """Stores those that differ from the last of the same server."""
    known = versions(session, [state.server for state in states])
    for state in states:
        if (last := known.get(state.server)) and last.noticed_at > state.scraped_at + FUTURE_TOLERANCE:
            _notice_before(session, state)
    for state in states:
        last, at = known.get(state.server), state.scraped_at
        if last is None or (
            (last.kind, last.version) != (state.kind, state.version) and last.noticed_at < at
        ):
            arrived = session.scalar(select(func.max(Record.seq))) or 0
            row = {"server": state.server, "kind": state.kind, "version": state.version}
            session.add(ServerVersion(noticed_at=at, noticed_seq=arrived, **row))


def _notice_before(session: Session, state: SourceState) -> None:
    """Versions that a clock which was ahead has noticed count as noticed just before, in the same order."""
    ahead = ServerVersion.server == state.server, ServerVersion.noticed_at >= state.scraped_at
    found = session.scalars(select(ServerVersion).where(*ahead).order_by(ServerVersion.noticed_at)).all()
    for number, row in enumerate(found):
        row.noticed_at = state.scraped_at - (len(found) - number) * timedelta.resolution
        session.flush()  # one after the other: two of them may swap places


def versions(session: Session, servers: Sequence[str]) -> dict[str, ServerVersion]:
    """The last version of each of these servers that is known."""
    query = select(ServerVersion).where(ServerVersion.server.in_(servers)).order_by(ServerVersion.noticed_at)
    return {row.server: row for row in session.scalars(query)}


def _replace(session: Session, states: Sequence[SourceState], kept: dict[str, Any]) -> None:
    statement: Insert = insert(Source)
    names = [column.name for column in Source.__table__.columns if not column.primary_key]
    values = {name: statement.excluded[name] for name in names} | kept
    replacing = statement.on_conflict_do_update(index_elements=["server"], set_=values)
    # In one order, so that two exports of the same servers wait for each other and not both.
    in_order = sorted(states, key=attrgetter("server"))
    # Of the connection: a session would make objects of what is written all the time.
    session.connection().execute(replacing, [_row(state) for state in in_order])


def _row(state: SourceState) -> dict[str, Any]:
    row = asdict(state)
    del row["started_at"], row["version"]  # kept in tables of their own
    return row


def look_at_pushed(session: Session, url: str, now: datetime) -> list[Source]:
    """The servers with this `url` in place of an address: stale where no export came for three intervals;
    those long forgotten are removed. What a clock that was ahead has noted counts as noted now."""
    pushed = Source.url == url
    session.execute(
        update(Source)
        .where(_free(pushed, Source.scraped_at > now + LATELY))
        .values(scraped_at=now, answered_at=case((Source.answered_at > now, now), else_=Source.answered_at))
    )
    session.execute(forgotten(now).where(pushed))
    patience = func.greatest(
        func.make_interval(0, 0, 0, 0, 0, 0, STALE_INTERVALS * Source.interval_seconds), LATELY
    )
    is_silent = _free(pushed, Source.condition != "stale", now - Source.scraped_at > patience)
    session.execute(
        update(Source)
        .where(is_silent)
        .values(condition="stale", detail="its exports have stopped", since=Source.scraped_at)
        .execution_options(synchronize_session=False)
    )
    return list(session.scalars(select(Source).where(pushed)))


def quiet_servers(known: Sequence[Source], now: datetime) -> set[str]:
    """Servers whose metrics were read just now and that have nothing to tell: no news is no failure."""
    quiet: tuple[Condition, ...] = ("idle", "waiting", "not_speculating")
    return {each.server for each in known if each.condition in quiet and _was_scraped(each, LATELY, now)}


def is_unread(source: Source, now: datetime) -> bool:
    """Whether no sidecar tries to scrape it any more: then its condition is of the past. Of one whose metrics
    are pushed, `look_at_pushed` notes that."""
    return source.url != PUSHED and not _was_scraped(source, UNREAD_AFTER, now)


def _was_scraped(source: Source, least: timedelta, now: datetime) -> bool:
    """Whether within three of its intervals, or within `least` where these are short."""
    return now - source.scraped_at <= max(STALE_INTERVALS * timedelta(seconds=source.interval_seconds), least)


def last_state(session: Session, server: str, url: str, now: datetime) -> SourceState | None:
    """As any sidecar last found the server at this address; no time is later than `now`, as the clock of
    another one may be ahead."""
    row = session.get(Source, server)
    if row is None or row.url != url:
        return None
    return SourceState(
        server=server,
        kind=row.kind,
        url=url,
        fidelity=cast("Fidelity | None", row.fidelity),
        condition=cast("Condition", row.condition),
        detail=row.detail,
        since=min(row.since, now),
        scraped_at=min(row.scraped_at, now),
        answered_at=None if row.answered_at is None else min(row.answered_at, now),
        interval_seconds=row.interval_seconds,
    )


def all_sources(session: Session) -> list[Source]:
    return list(session.scalars(select(Source).order_by(Source.server)))

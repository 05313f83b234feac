"""What arriving records say that a server serves. Canary probes say nothing of it."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from driftguard.records.documents.retraining_run import Heard, Rollout
from driftguard.store import drafts
from driftguard.store.tables import Stream

# A draft that is in service stays so until nothing was heard of it for this long beside another one: while
# servers are restarted one by one, both are heard.
SILENCE: Final = timedelta(minutes=5)
# For which nothing is heard of a target beside another one of its server that took its place, and is not only
# tried beside it. It does not count while neither is heard.
REPLACED_AFTER: Final = timedelta(hours=1)


def newest_stream(session: Session, server: str) -> Stream | None:
    """The stream heard last; None: no records."""
    query = select(Stream).where(
        Stream.server == server, Stream.method != "none", Stream.traffic_arrived_at.is_not(None)
    )
    return session.scalars(
        query.order_by(Stream.traffic_arrived_at.desc(), Stream.id.desc()).limit(1)
    ).first()


def stream_in_service(session: Session, server: str) -> Stream | None:
    """The stream of the draft in service if it is still heard, else the one heard last; None: no records."""
    newest = newest_stream(session, server)
    if newest is None or newest.traffic_arrived_at is None:
        return newest
    known = drafts.in_service(session, server, newest.target)
    if known is None:
        return newest
    since = newest.traffic_arrived_at - SILENCE
    return stream_since(session, server, newest.target, known.version, since) or newest


def silence(session: Session, server: str, target: str) -> timedelta | None:
    """For how long nothing had been heard of this target when its server was heard last; None: nothing was
    ever."""
    heard_at = func.max(Stream.traffic_arrived_at)
    of_server = session.scalar(select(heard_at).where(Stream.server == server))
    of_target = session.scalar(select(heard_at).where(Stream.server == server, Stream.target == target))
    return None if of_server is None or of_target is None else of_server - of_target


def heard(session: Session, server: str, target: str, version: str) -> Heard:
    """After which a record shows that the server has begun to serve this draft."""
    known = _stream(session, server, target, version)
    newest = newest_stream(session, server)
    if known is None or newest is None:
        return Heard()
    ended_at = session.scalar(select(func.max(Stream.traffic_ended_at)).where(Stream.server == server))
    return Heard(newest.traffic_arrived_at, ended_at)


def stream_of_rollout(session: Session, server: str, target: str, asked: Rollout) -> Stream | None:
    """The stream of the draft that was asked for, if a record shows that it is served."""
    before = asked.heard or Heard(asked.asked_at, asked.asked_at)
    if before.arrived_at is None or before.ended_at is None:
        return _stream(session, server, target, asked.version)
    newest = newest_stream(session, server)
    if newest is not None and newest.traffic_arrived_at and newest.traffic_arrived_at < before.arrived_at:
        # The sidecar's clock was set back since, and the times of streams with it: the order is left.
        is_wanted = (newest.target, newest.draft_version) == (target, asked.version)
        return newest if is_wanted and asked.heard is not None else None
    found = _stream(session, server, target, asked.version)
    if found is None or found.traffic_arrived_at is None or found.traffic_ended_at is None:
        return None
    is_later = found.traffic_arrived_at > before.arrived_at and found.traffic_ended_at > before.ended_at
    return found if is_later else None


def stream_since(session: Session, server: str, target: str, version: str, since: datetime) -> Stream | None:
    """The stream of this draft if a record of it ended and arrived since then."""
    is_heard = Stream.traffic_arrived_at >= since, Stream.traffic_ended_at >= since
    return _stream(session, server, target, version, *is_heard)


def _stream(
    session: Session, server: str, target: str, version: str, *which: ColumnElement[bool]
) -> Stream | None:
    """The stream of this draft that was heard last; None: none was ever."""
    wanted = (
        Stream.server == server,
        Stream.target == target,
        Stream.draft_version == version,
        Stream.method != "none",
        Stream.traffic_arrived_at.is_not(None),
        *which,
    )
    newest_first = Stream.traffic_arrived_at.desc(), Stream.id.desc()
    return session.scalars(select(Stream).where(*wanted).order_by(*newest_first).limit(1)).first()

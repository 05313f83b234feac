"""Which servers the sidecars on this database have in `[[engines]]`. Each tells its own every minute, so that
one whose settings lack a server leaves its runs to the sidecar that can go on with them."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import Final

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from driftguard.store.tables import ConfiguredEngine

FORGOTTEN_AFTER: Final = timedelta(hours=1)  # settings change rarely; a sidecar may be stopped for a while


def tell(session: Session, servers: Collection[str]) -> None:
    """That this sidecar has these in its settings, by the database's clock."""
    if servers:  # in one order, so that two sidecars wait for each other and not both
        rows = [{"server": server, "told_at": func.now()} for server in sorted(servers)]
        told = insert(ConfiguredEngine).values(rows)
        session.execute(told.on_conflict_do_update(index_elements=["server"], set_={"told_at": func.now()}))


def told(session: Session) -> set[str]:
    """Servers that some sidecar has in its settings, or had within the last hour; this one's among them."""
    query = select(ConfiguredEngine.server).where(ConfiguredEngine.told_at >= func.now() - FORGOTTEN_AFTER)
    return set(session.scalars(query))

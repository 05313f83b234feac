"""Whether a connection keeps its session of the server, as advisory locks and settings of a session need."""

from __future__ import annotations

from sqlalchemy import Connection, Row, text

# The time too: servers in containers count their processes from 1. Not from pg_stat_activity, which some
# take from all roles.
_SESSION = text("SELECT pg_backend_pid(), pg_postmaster_start_time()")


def is_shared(one: Connection, other: Connection) -> bool:
    """Whether a pooler in between gives every transaction another session (pooled transactions).

    Both connections are in no transaction. A pooler that hands out what was given back last gives `other` the
    session of `one`; one that hands them out in turn gives `one` itself another.
    """
    first, then = _ask(one), _ask(one)
    return first != then or _ask(other) == then


def _ask(connection: Connection) -> Row[tuple[object, ...]]:
    session = connection.execute(_SESSION).one()
    connection.rollback()
    return session

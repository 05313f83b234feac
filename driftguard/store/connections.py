"""Connections that notice when nobody is there any more.

Packets that are dropped end in an error of the socket: keepalives, and tcp_user_timeout for what was sent and
not acknowledged. A server that is frozen, or a middlebox that acknowledges for it, does not: there a
connection gives up by itself when an answer is overdue.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from typing import Any, Final

import psycopg
from psycopg.pq import TransactionStatus

from driftguard.store.work import Work

CONNECT_TIMEOUT_SECONDS: Final = 5
PING_SECONDS: Final = 3.0  # for the word whether a connection out of the pool still works
# libpq ignores all but the first over a Unix socket.
_OF_A_NEW_CONNECTION: Final = {
    "connect_timeout": CONNECT_TIMEOUT_SECONDS,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 4,
    "tcp_user_timeout": 20_000,  # milliseconds
}
# The server, too, notices within half a minute that the machine at the other end is gone, not after hours:
# what it locked is free then.
_SERVER_KEEPALIVES: Final = {
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "4",
}
_SESSION: Final = {"TimeZone": "UTC", **_SERVER_KEEPALIVES}


class NoAnswer(psycopg.OperationalError):
    """The database did not answer for {seconds} s."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer for {seconds:g} s")
        self.seconds = seconds


class WatchedConnection(psycopg.Connection[Any]):
    """Raises NoAnswer, and closes itself, where a statement is not answered within `silence_seconds`."""

    silence_seconds: float = PING_SECONDS + CONNECT_TIMEOUT_SECONDS

    def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().wait(_watched(gen, self.pgconn, self.silence_seconds), *args, **kwargs)
        except NoAnswer:
            self.close()
            raise


class WatchedAsyncConnection(psycopg.AsyncConnection[Any]):
    """The same for asyncio."""

    silence_seconds: float = PING_SECONDS + CONNECT_TIMEOUT_SECONDS

    async def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().wait(_watched(gen, self.pgconn, self.silence_seconds), *args, **kwargs)
        except NoAnswer:
            await self.close()
            raise


def _watched(gen: Any, pgconn: psycopg.pq.abc.PGconn, seconds: float) -> Generator[Any, Any, Any]:
    """What psycopg waits for, which it resumes a few times a second also where nothing came.

    Who listens for notifications has no statement under way, and may wait for as long as it takes.
    """
    deadline = time.monotonic() + seconds
    ready = None
    while True:
        try:
            state = gen.send(ready)
        except StopIteration as end:
            return end.value
        ready = yield state
        if (
            not ready
            and time.monotonic() > deadline
            and pgconn.transaction_status == TransactionStatus.ACTIVE
        ):
            raise NoAnswer(seconds)


def connect_parameters(given: Mapping[str, object]) -> dict[str, Any]:
    """What a connection is opened with, unless the database's URL says otherwise (`given`)."""
    return {name: value for name, value in _OF_A_NEW_CONNECTION.items() if name not in given}


def session_settings(work: Work | None = None) -> tuple[str, dict[str, str]]:
    """One statement for all of them, and its parameters. A statement instead of the `options` start-up
    parameter, which connection poolers refuse."""
    settings = _SESSION if work is None else work.server_settings()
    calls = ", ".join(f"set_config('{name}', %({name})s, false)" for name in settings)
    return f"SELECT {calls}", settings


def apply(connection: psycopg.Connection[Any], work: Work | None = None) -> None:
    """Outside a transaction, whose end would undo it."""
    statement, settings = session_settings(work)
    before, connection.autocommit = connection.autocommit, True
    connection.execute(statement.encode(), settings)
    connection.autocommit = before


async def apply_async(connection: psycopg.AsyncConnection[Any], work: Work) -> None:
    before = connection.autocommit
    await connection.set_autocommit(True)
    for of in (None, work):
        statement, settings = session_settings(of)
        await connection.execute(statement.encode(), settings)
    await connection.set_autocommit(before)

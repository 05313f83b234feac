"""Checks of everything that a sidecar needs, with the fix of what is not well."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from driftguard.app.doctor import database, machine, servers
from driftguard.app.doctor.finding import Finding
from driftguard.settings import Settings

__all__ = ["Finding", "checks"]


def checks(settings: Settings, config: Path | None, *, send_test_page: bool) -> Iterator[Finding]:
    """Of a sidecar with these settings, from the file `config`; each is made when it is asked for."""
    yield from machine.versions()
    unread = list(machine.authorities())
    yield from unread
    yield from machine.files(settings, config)
    yield from machine.disk(settings)
    yield from database.database(settings)
    yield from servers.sidecar(settings)
    yield from servers.sources(settings)
    if not unread:
        yield from servers.engines(settings)
    yield from machine.training(settings)
    if not unread:
        yield from servers.destinations(settings, send_test_page=send_test_page)

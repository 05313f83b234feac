"""The store's tests run twice: on the embedded server, and on PostgreSQL 15 where Debian's is installed."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from driftguard.store.embedded import start_embedded
from tests.conftest import create_template, server_directory, stop_syncing

DEBIAN_15 = Path("/usr/lib/postgresql/15/bin")


@pytest.fixture(scope="session", params=["embedded", "debian-15"])
def postgres_server(request: pytest.FixtureRequest) -> Iterator[str]:
    server = start_embedded if request.param == "embedded" else debian_15
    with server_directory() as directory, server(directory) as url:
        stop_syncing(url)
        yield url


@pytest.fixture(scope="session")
def template_database(postgres_server: str) -> str:
    """One per server: the fixture of the other suites is bound to the embedded one."""
    return create_template(postgres_server)


@contextlib.contextmanager
def debian_15(directory: Path) -> Iterator[str]:
    if not (DEBIAN_15 / "initdb").exists():
        pytest.skip(f"PostgreSQL 15 is not installed in {DEBIAN_15}")
    user = "postgres" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
    shutil.chown(directory, user)
    data = directory / "data"

    def run(*command: str) -> None:
        subprocess.run(
            [str(DEBIAN_15 / command[0]), *command[1:]],
            user=user if os.geteuid() == 0 else None,
            cwd=directory,
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=200,
        )

    run("initdb", "--auth=trust", "--encoding=utf8", "-U", "postgres", "-D", str(data))
    arguments = f"-c listen_addresses= -c unix_socket_directories={directory}"
    run("pg_ctl", "-w", "-D", str(data), "-l", str(directory / "log"), "-o", arguments, "start")
    try:
        yield f"postgresql://postgres@/postgres?host={directory}"
    finally:
        run("pg_ctl", "-w", "-m", "immediate", "-D", str(data), "stop")

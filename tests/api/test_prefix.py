"""The sidecar under a path of a reverse proxy: every request means the same with the prefix and without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import iter_route_contexts
from fastapi.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send
from typer.testing import CliRunner

from driftguard.api.application import http_application
from driftguard.api.guarding import route_of
from driftguard.api.pages import routes
from driftguard.api.prefix import Prefix, path_of
from driftguard.app import Sidecar, create_app
from driftguard.cli.main import app as commands
from driftguard.client import Client
from driftguard.settings import Settings
from driftguard.settings.loading import load_settings
from driftguard.store.database import Database
from driftguard.store.keys import create_key
from driftguard_vllm.captures import CaptureSender
from tests.alerting.incident_rows import add_incident
from tests.api.ingest_server import serving
from tests.api.reverse_proxy import EXTERNAL_URL, FORMS, PREFIX, Form, behind
from tests.store.samples import make_records

BROWSER = {"Accept": "text/html"}
FORWARDED = {"X-Forwarded-For": "203.0.113.7"}


@pytest.fixture
def sidecar(database: Database, tmp_path: Path) -> Iterator[httpx.Client]:
    settings = Settings.model_validate(
        {
            "data_dir": tmp_path,
            "alerting": {"external_url": EXTERNAL_URL},
            "capture": {"enabled": True},
        }
    )
    with serving(create_app(Sidecar(settings, database, EXTERNAL_URL))) as client:
        yield client


def routed() -> Iterator[tuple[str, str]]:
    """(method, path) of every route, {name} for a part that is any."""
    for route in iter_route_contexts(http_application().routes):
        yield from ((method, route.path or "") for method in sorted(route.methods or ()))


def status_of(client: httpx.Client, method: str, target: str) -> int:
    """Of the answer to a forwarded request whose target is sent as it is."""
    connection = HTTPConnection(client.base_url.host, client.base_url.port or 80, timeout=60)
    with closing(connection):
        connection.request(method, target, headers=FORWARDED)
        return connection.getresponse().status


def seen(path: str) -> Scope:
    """The scope of a request for `path`, as what is behind Prefix sees it."""
    scope: Scope = {"type": "http", "method": "GET", "path": path, "root_path": "", "headers": []}
    found: list[Scope] = []

    async def behind_it(scope: Scope, _receive: Receive, _send: Send) -> None:
        found.append(scope)

    async def never() -> Message:
        raise AssertionError

    async def nothing(_message: Message) -> None:
        raise AssertionError

    passed = Prefix(behind_it, PREFIX)(scope, never, nothing)
    with pytest.raises(StopIteration):
        passed.send(None)
    return found[0]


def test_every_route_is_guarded_alike_with_the_prefix_and_without() -> None:
    for require_key_to_read in (False, True):
        settings = Settings.model_validate(
            {"host": "0.0.0.0", "http": {"require_key_to_read": require_key_to_read}}
        )
        asked = list(routed())
        assert ("GET", "/api/v1/captures") in asked
        for method, path in asked:
            plain: dict[str, Any] = {"method": method, "headers": [(b"authorization", b"Bearer x")]}
            wanted = route_of({"path": path, **plain}, settings)
            for given in (path, PREFIX + path):
                scope = {**seen(given), **plain}
                assert path_of(scope) == path
                assert route_of(scope, settings) == wanted, given


def test_no_path_of_its_own_can_be_the_prefix(tmp_path: Path) -> None:
    file = tmp_path / "driftguard.toml"
    for path in {f"/{path.split('/')[1]}" for _, path in routed()} - {"/"} | {"/api/v1"}:
        file.write_text(f"[alerting]\nexternal_url = 'https://ops.example.com{path}'", encoding="utf-8")
        with pytest.raises(Exception, match=f"the path {path} is one of the sidecar's own"):
            load_settings(file)
    for path in ("/api/driftguard", "/metrics-of-drafts", "/dashboards/driftguard"):
        file.write_text(f"[alerting]\nexternal_url = 'https://ops.example.com{path}'", encoding="utf-8")
        assert load_settings(file).alerting.prefix == path


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_what_leads_elsewhere_leads_there_with_the_prefix(sidecar: httpx.Client, form: Form) -> None:
    with behind(sidecar, form) as client:
        for path in ("/retraining/", "/api/v1/status/?limit=1", "/docs/"):
            moved = client.get(f"{PREFIX}{path}")
            assert moved.status_code == 307
            to = httpx.URL(moved.headers["location"])
            assert to.raw_path.decode() == f"{PREFIX}{path}".replace("/?", "?").rstrip("/")
            assert (to.host, to.port) == (client.base_url.host, client.base_url.port)
            assert client.get(to).status_code == 200
        document = client.get(f"{PREFIX}/api/v1/openapi.json").json()
        assert document["servers"] == [{"url": PREFIX}]
        assert f"Its paths lie behind <code>{PREFIX}</code>" in client.get(f"{PREFIX}/docs").text
        rules = client.get(f"{PREFIX}/alerts/rules.yaml").text
        assert f"runbook_url: {EXTERNAL_URL}runbooks/DriftGuardRollback" in rules
        runbook = client.get(f"{PREFIX}/runbooks/DriftGuardAcceptanceDrift").text
        assert f'href="{EXTERNAL_URL}retraining"' in runbook


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_problems_are_pages_with_the_prefix_too(
    sidecar: httpx.Client, form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError

    with behind(sidecar, form) as client:
        monkeypatch.setattr(routes, "list_keys", fails)
        for path, status in (
            ("/nothing", 404),
            ("/streams/999", 404),
            ("/?sort=x", 422),
            ("/configuration", 500),
        ):
            page = client.get(f"{PREFIX}{path}", headers=BROWSER)
            assert (page.status_code, page.headers["content-type"]) == (status, "text/html; charset=utf-8")
            assert f'<a href="{PREFIX}/">Fleet</a>' in page.text
            assert f'href="{PREFIX}/static/style.css"' in page.text
        for path in ("/nothing", "/api/v1/nothing"):
            problem = client.get(f"{PREFIX}{path}", headers=BROWSER if "/api/" in path else {})
            assert problem.json()["detail"] == f"{path}: not found"
        refused = client.delete(f"{PREFIX}/api/v1/records")
        assert refused.status_code == 401  # before it is routed
        key = {"Authorization": "Bearer wrong"}
        assert client.post(f"{PREFIX}/v1/traces", headers=key).json()["code"] == 16  # in the form of OTLP


@pytest.mark.slow
def test_who_asks_the_port_itself_needs_no_prefix_and_may_use_it(sidecar: httpx.Client) -> None:
    for path in ("/healthz", "/readyz", "/metrics", "/", "/api/v1/status", "/static/page.js"):
        plain, prefixed = sidecar.get(path), sidecar.get(PREFIX + path)
        assert (plain.status_code, prefixed.status_code) == (200, 200), path
        assert plain.headers["content-type"] == prefixed.headers["content-type"]
    assert sidecar.get(PREFIX).text.startswith("<!doctype html>")
    wrong = sidecar.delete(f"{PREFIX}/api/v1/records")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, POST")


@pytest.mark.slow
def test_no_other_spelling_of_the_prefix_comes_by_the_key(sidecar: httpx.Client, database: Database) -> None:
    with database.session() as session:
        key = create_key(session, "operator")
    incident = add_incident(database, [])
    captured = "/api/v1/captures"
    for path in (captured, PREFIX + captured, f"/%64riftguard{captured}", f"{PREFIX}{captured}/"):
        assert sidecar.get(path, headers=FORWARDED).status_code == 401, path
        by_key = sidecar.get(
            path, headers={**FORWARDED, "Authorization": f"Bearer {key}"}, follow_redirects=True
        )
        assert by_key.status_code == 200, path
    for path in (
        f"{PREFIX}{PREFIX}{captured}",
        f"{PREFIX}/{captured}",
        f"/{PREFIX}{captured}",
        f"{PREFIX.upper()}{captured}",
        f"{PREFIX}x{captured}",
        f"{PREFIX}%2f{captured}",
        f"/other/..{PREFIX}{captured}",
        f"{PREFIX}/..{captured}",
    ):
        assert status_of(sidecar, "GET", path) == 404, path
        assert status_of(sidecar, "POST", path) == 401, path
    shown = f"{PREFIX}/api/v1/incidents/{incident}"
    assert sidecar.get(shown, headers=FORWARDED).status_code == 200
    assert sidecar.get(shown, headers={**FORWARDED, "Authorization": "Bearer wrong"}).status_code == 401
    for path, most in (
        ("/api/v1/records", 413),
        (f"{PREFIX}/api/v1/records", 413),
        (f"{PREFIX}/api/v1/retrain", 413),
    ):
        assert sidecar.post(path, content=b"x" * 6_000_001).status_code == most
    assert sidecar.post(f"{PREFIX}/api/v1/records", content=b" " * 70_000 + b"[]").status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_senders_and_commands_reach_it_by_its_address(
    sidecar: httpx.Client, database: Database, form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    with database.session() as session:
        key = create_key(session, "operator")
    records = make_records(3)
    with behind(sidecar, form) as client:
        address = f"{client.base_url}{PREFIX}"
        for url in (address, f"{address}/"):
            with Client(url, api_key=key) as sender:
                sender.send(records[0])
                assert sender.flush(30)
                assert sender.status().streams is not None
            done = CliRunner().invoke(commands, ["status"], env={"DRIFTGUARD_SIDECAR": url})
            assert done.exit_code == 0, done.output
            capturing = CaptureSender(url, key)
            capturing.send(records[0], [1, 2], [3])
            capturing.close(30)
        kept = client.get(f"{PREFIX}/api/v1/captures", headers={"Authorization": f"Bearer {key}"})
    assert str(records[0].record_id) in kept.text


def test_without_a_path_nothing_is_a_prefix(database: Database, tmp_path: Path) -> None:
    settings = Settings.model_validate(
        {"data_dir": tmp_path, "alerting": {"external_url": "https://dg.example.com/"}}
    )
    client = TestClient(create_app(Sidecar(settings, database, "")), base_url="http://127.0.0.1")
    assert client.get(f"{PREFIX}/healthz").status_code == 404
    assert "servers" not in client.get("/api/v1/openapi.json").json()
    moved = client.get("/docs/", follow_redirects=False)
    assert moved.headers["location"] == "http://127.0.0.1/docs"
    assert '<a href="/">Fleet</a>' in client.get("/docs").text

"""No secret of the settings in what people read, whichever setting holds it and however it failed."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import httpx
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, SecretStr

from driftguard.app import Sidecar, create_app
from driftguard.logs import configure_logging
from driftguard.masking import MASK, Secrets, address
from driftguard.retraining.engines.engine_admin import EngineAdmin, EngineRefused
from driftguard.retraining.engines.order import Order
from driftguard.retraining.engines.webhook import post
from driftguard.settings import Settings
from driftguard.settings.secrets import secrets_of
from driftguard.store.database import Database, parse_url
from tests.alerting.http_receiver import wait_until
from tests.alerting.incident_rows import add_incident
from tests.api.ingest_server import serving

LEAST = 4
SECRET = st.text(min_size=8, max_size=20, alphabet=st.characters(codec="utf-8", exclude_characters="\n\r"))


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    before = structlog.get_config()
    root = logging.getLogger()
    formatters = [(handler, handler.formatter) for handler in root.handlers]
    handlers = list(root.handlers)
    yield
    structlog.configure(**before)
    root.handlers[:] = handlers
    for handler, formatter in formatters:
        handler.setFormatter(formatter)


def logged(secret: str, **values: object) -> str:
    """The line of a log event with these values, and the traceback of an error that names the secret."""
    out = StringIO()
    with redirect_stdout(out):
        configure_logging("info", Secrets([secret]))
        try:
            int(f"it was {secret}, that is {secret!r}")
        except ValueError:
            structlog.get_logger("test").exception("an event", **values)
    return out.getvalue()


@given(SECRET.filter(lambda secret: len(secret.strip()) >= LEAST and secret not in "the log of an event"))
def test_no_form_of_a_secret_reaches_a_log_line(secret: str) -> None:
    url = quote(secret, safe="")
    nested = {"list": [secret, (secret,)], "mapping": {secret: secret.encode()}, "url": url}
    line = logged(secret, plain=secret, nested=nested, error=ValueError(secret))
    told = line.replace(MASK, "")
    for form in (secret, repr(secret)[1:-1], repr(secret.encode())[2:-1], url):
        if form not in logged("nothing of it", other="value"):  # it is part of what a line always has
            assert form not in told


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://user:pass@host:8443/path?query#fragment", "https://host:8443"),
        ("http://user:p@ss@[::1]:80/x", "http://[::1]:80"),
        ("http://host:hunter2/", "http://host:"),
        ("postgresql://u:p@db/name", "postgresql://db"),
        ("no address", "(an address that cannot be read)"),
    ],
)
def test_of_an_address_only_scheme_host_and_port_are_shown(url: str, shown: str) -> None:
    assert address(url) == shown


def test_of_the_address_of_a_database_only_passwords_are_masked() -> None:
    """Hosts, options and the name of a role without a password are what an error of the database is about."""
    url = (
        "postgresql://driftguard@/records?host=db-1:5432,db-2:5432&target_session_attrs=read-write"
        "&sslmode=require&sslpassword=sesame-1&password=sesame-2"
    )
    secrets = secrets_of(Settings.model_validate({"database_url": url}))
    line = "driftguard: db-1:5432: session is not read-write, require"
    assert secrets.masked(line) == line
    assert secrets.masked("sesame-1 sesame-2") == f"{MASK} {MASK}"
    for password in ("sesame/4", "ses#ame", "ses?ame=5", "/sesame"):  # as they are taken without escapes
        url = f"postgresql://driftguard:{password}@db/x"
        assert parse_url(url).password == password
        told = secrets_of(Settings.model_validate({"database_url": url})).masked(f"driftguard {password}.")
        assert told == f"driftguard {MASK}."
    withheld = secrets_of(Settings.model_validate({"database_url": "postgresql://driftguard:sesame-3@db/x"}))
    assert withheld.masked("driftguard sesame-3") == f"driftguard {MASK}"


@pytest.mark.parametrize(
    ("url", "secret"),
    [
        ("https://oncall.corp/integrations/driftguard/alertmanager/3f9c01d2ab44/", "3f9c01d2ab44"),
        ("https://hooks.example.com/services/T0SECRET/B1SECRET", "B1SECRET"),
        ("https://hooks.example.com/driftguard/correcthorsebatterystaple", "correcthorsebatterystaple"),
        ("https://ntfy.corp/pagingtopic", "pagingtopic"),
        ("https://hooks.corp/driftguard", "https://hooks.corp/driftguard"),
    ],
)
def test_words_of_the_address_of_a_webhook_are_no_secrets(url: str, secret: str) -> None:
    """Each log line and error that named Alertmanager, services or a command had asterisks there."""
    secrets = secrets_of(Settings.model_validate({"alerting": {"webhook_urls": [url]}}))
    line = "alertmanager: no integrations of services; `driftguard keys create NAME`"
    assert secrets.masked(line) == line
    path = url.partition(".corp/")[2] or url.partition(".com/")[2]
    assert secret not in secrets.masked(f"{secret} at {url}") or path == "driftguard"
    assert secrets.masked(path.strip("/")) == (path if path == "driftguard" else MASK)


def test_a_key_whose_variable_ends_in_a_line_break_is_masked() -> None:
    """Senders leave it out, and what they send is in their errors."""
    assert Secrets(["hunter2hunter2\n"]).masked("Bearer hunter2hunter2, sent") == f"Bearer {MASK}, sent"


def test_a_library_that_logs_by_itself_is_masked_too(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger().handlers[:] = []
    errors = StringIO()
    with redirect_stderr(errors):
        configure_logging("info", Secrets(["hunter2hunter2"]))
        try:
            int("hunter2hunter2")
        except ValueError:
            logging.getLogger("a.library").exception("failed with %s", "hunter2hunter2")
    assert "failed with ***" in errors.getvalue()
    assert "with base 10: '***'" in errors.getvalue()


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("no_color", "is_coloured"), [("", True), ("1", False)])
def test_a_log_on_a_terminal_has_colours_unless_told_not_to(
    no_color: str, is_coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    with redirect_stdout(Terminal()) as terminal:
        configure_logging("info")
        structlog.get_logger().info("started")
    assert ("\x1b[" in terminal.getvalue()) == is_coloured


KEY = "sesame-4711-{}"


def settings_with_secrets(port: int, data_dir: Path) -> Settings:
    """Every setting that can hold a secret has one of its own; all lead to a port of this machine."""
    place = f"127.0.0.1:{port}"

    def url(number: str, path: str = "") -> str:
        return f"http://user:{KEY.format(number)}@{place}{path}?token={KEY.format(number + 'q')}"

    return Settings.model_validate(
        {
            "data_dir": data_dir,
            "database_url": f"postgresql://user:{KEY.format('db')}@{place}/x",
            "engines": [
                {"server": "e", "admin_url": url("admin"), "api_key": KEY.format("engine")},
                {
                    "server": "r",
                    "update_url": url("update"),
                    "target_directory": ".",
                    "draft_directory": ".",
                    "num_speculative_tokens": 4,
                },
            ],
            "sources": [{"url": url("source", "/metrics"), "server": "s", "api_key": KEY.format("scrape")}],
            "scraping": {"interval_seconds": 1},
            "retraining": {
                "promote_webhook": url("promote", f"/{KEY.format('promotepath')}"),
                "promote_webhook_key": KEY.format("promotekey"),
                "promote_timeout_seconds": 1,
            },
            "probes": {
                "interval_seconds": 1,
                "targets": [{"server": "chat", "url": url("probe"), "api_key": KEY.format("probekey")}],
            },
            "alerting": {
                "alertmanager_urls": [url("alertmanager")],
                "webhook_urls": [url("webhook", f"/services/{KEY.format('webhookpath')}")],
            },
            "proxy": {"upstream": url("upstream"), "upstream_api_key": KEY.format("upstreamkey")},
        }
    )


def test_the_settings_of_the_test_have_a_secret_wherever_there_can_be_one(tmp_path: Path) -> None:
    """So that a new setting is tried here too."""

    def missing(value: object, name: str) -> Iterator[str]:
        if isinstance(value, BaseModel):
            for field in type(value).model_fields:
                yield from missing(getattr(value, field), f"{name}.{field}")
        elif isinstance(value, list):
            for item in value:
                yield from missing(item, name)
        else:
            text = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
            holds = name.endswith(("_key", "url", "urls", "promote_webhook", "upstream"))
            if holds and "sesame" not in text:
                yield name

    # The last three of an engine without.
    public = {
        *(".alerting.external_url", ".alerting.grafana_url"),
        *(".engines.admin_url", ".engines.update_url", ".engines.api_key"),
    }
    settings = settings_with_secrets(9, tmp_path)
    assert set(missing(settings, "")) <= public
    told = secrets_of(settings).masked(repr(settings.model_dump(mode="python")))
    assert "sesame" not in told.replace(repr(SecretStr("x")), "")


class _Echo(BaseHTTPRequestHandler):
    """Refuses, and repeats what it was sent, as many servers do on their pages of errors."""

    def do_POST(self) -> None:
        body = f"cannot {self.command} {self.path}\n{self.headers}".encode()
        self.send_response(404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST  # noqa: N815 (as http.server calls it)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def echoing() -> Iterator[int]:
    """The port of a server that is one."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Echo)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("someone_is_there", [False, True], ids=["nobody there", "refused"])
def test_no_secret_is_in_the_log_the_metrics_the_api_the_pages_or_the_database(
    database: Database, tmp_path: Path, someone_is_there: bool
) -> None:
    with echoing() as port:
        settings = settings_with_secrets(port if someone_is_there else 9, tmp_path)
        out, errors = StringIO(), StringIO()
        logging.getLogger().handlers[:] = []
        with redirect_stdout(out), redirect_stderr(errors):
            configure_logging("debug", secrets_of(settings))
            shown = _everything_fails(database, settings)
    told = out.getvalue() + errors.getvalue() + shown
    assert "did not take" in told
    assert "sesame" not in told


def _everything_fails(database: Database, settings: Settings) -> str:
    """What the API, the pages, the metrics and the notifications say after every destination has failed."""
    sidecar = Sidecar(settings, database, "http://sidecar")
    incident_id = add_incident(database, sidecar._paging.destinations)
    texts = [_promotion(settings), _engine(settings)]
    with serving(create_app(sidecar)) as client:

        def detail() -> dict[str, Any]:
            found: dict[str, Any] = client.get(f"/api/v1/incidents/{incident_id}").json()
            return found

        wait_until(lambda: all(item["last_error"] for item in detail()["notifications"]), "the failures")
        wait_until(lambda: "unreachable" in _status(client) or "hidden" in _status(client), "the scrape")
        paths = [
            "/metrics",
            "/api/v1/status",
            "/",
            f"/incidents/{incident_id}",
            "/readyz",
            "/api/v1/incidents",
        ]
        texts += [client.get(path).text for path in paths]
        texts.append(str(detail()))
    with database.engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT destination, last_error FROM notifications").all()
    return "\n".join([*texts, str(rows)])


def _status(client: httpx.Client) -> str:
    return client.get("/api/v1/status").text + client.get("/metrics").text


def _promotion(settings: Settings) -> str:
    rules = settings.retraining
    asked_at = datetime.now(UTC)
    order = Order("promote", uuid4(), "server", "target", "method", "draft", "v2", "before", "v1", asked_at)
    assert rules.promote_webhook is not None
    reply = post(rules.promote_webhook, rules.promote_webhook_key, order, 1.0, lambda: False)
    return str(reply)


def _engine(settings: Settings) -> str:
    engine = settings.engines[0]
    assert engine.admin_url is not None
    assert engine.api_key is not None
    try:
        EngineAdmin(engine.admin_url, engine.api_key.get_secret_value()).info()
    except EngineRefused as error:
        return str(error)
    raise AssertionError("the engine answered")


def test_a_log_that_cannot_be_written_ends_nobody_who_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As standard output in a file on a full disk: the loop that scrapes logged that a source answers again,
    and ended, and nothing was scraped until the next start."""
    before = structlog.get_config()
    try:
        configure_logging("info")
        with Path("/dev/full").open("w", buffering=1) as full:
            monkeypatch.setattr(sys, "stdout", full)
            structlog.get_logger("test").info("source", condition="reporting")
            monkeypatch.setattr(sys, "stdout", None)
            structlog.get_logger("test").info("source", condition="reporting")
            with suppress(OSError):
                full.close()  # which tries once more
    finally:
        monkeypatch.undo()
        structlog.configure(**before)

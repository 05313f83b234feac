"""No secret that the engine is given in what it logs, whichever option or variable holds it."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from urllib.parse import quote

import pytest
import structlog
from driftguard_engine.server.logs import (
    ADDRESS_VARIABLES,
    SECRET_VARIABLES,
    FloodFilter,
    configure_logs,
    secrets_of,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from driftguard.masking import MASK, Secrets

SECRET = st.text(min_size=8, max_size=20, alphabet=st.characters(codec="utf-8", exclude_characters="\n\r"))
Given = tuple[dict[str, str], str | None, str | None]  # environment, sidecar, api_key_hash


def url(secret: str) -> str:
    return f"http://user:{quote(secret, safe='')}@host:8200"


WAYS: dict[str, Callable[[str], Given]] = {
    "--sidecar": lambda secret: ({}, url(secret), None),
    "--sidecar, query": lambda secret: ({}, f"http://host/?key={quote(secret, safe='')}", None),
    "--api-key-hash": lambda secret: ({}, None, secret),
    **{name: lambda secret, name=name: ({name: secret}, None, None) for name in SECRET_VARIABLES},  # type: ignore[misc]
    **{name: lambda secret, name=name: ({name: url(secret)}, None, None) for name in ADDRESS_VARIABLES},  # type: ignore[misc]
    "https_proxy": lambda secret: ({"https_proxy": url(secret)}, None, None),
}


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    before, root = structlog.get_config(), logging.getLogger()
    handlers = [(handler, handler.formatter) for handler in root.handlers]
    yield
    structlog.configure(**before)
    root.handlers[:] = [handler for handler, _ in handlers]
    for handler, formatter in handlers:
        handler.setFormatter(formatter)


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def logged(secret: str, secrets: Secrets, out: StringIO) -> str:
    """An event of the engine's and one of a library's, each with the traceback of an error that names it."""
    logging.getLogger().handlers[:] = []
    with redirect_stderr(out):
        configure_logs("info", secrets)
        try:
            int(f"it was {secret}, that is {secret!r}")
        except ValueError:
            values = {"list": [secret, (secret,)], "bytes": secret.encode(), "url": url(secret)}
            structlog.get_logger("test").exception(
                "an event", plain=secret, nested=values, error=OSError(secret)
            )
            logging.getLogger("a.library").exception("failed with %r", secret)
    return out.getvalue()


@pytest.mark.parametrize("place", [StringIO, Terminal])
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(secret=SECRET.filter(lambda secret: len(secret.strip()) >= 4))
def test_no_form_of_a_secret_reaches_the_log(way: str, place: type[StringIO], secret: str) -> None:
    environment, sidecar, api_key_hash = WAYS[way](secret)
    secrets = secrets_of({"HF_HOME": "/nowhere", **environment}, sidecar, api_key_hash)
    told = logged(secret, secrets, place()).replace(MASK, "")
    usual = logged("nothing of it", Secrets([]), place())
    for form in (secret, repr(secret)[1:-1], repr(secret.encode())[2:-1], quote(secret, safe="")):
        if form not in usual:  # else it is part of what a line always has
            assert form not in told


def test_the_token_of_the_hub_is_found_in_its_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hf_sesame4711\n")
    for environment in ({"HF_HOME": str(tmp_path)}, {"HF_TOKEN_PATH": str(tmp_path / "token")}):
        assert secrets_of(environment, None, None).masked("a hf_sesame4711 b") == f"a {MASK} b"


@pytest.mark.parametrize("sidecar", ["ftp://me:hunter2hunter2@host", "me:hunter2hunter2@host"])
def test_a_refused_address_is_not_told(sidecar: str) -> None:
    command = [sys.executable, "-m", "driftguard_engine", "--sidecar", sidecar]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "sidecar: not a URL" in ended.stderr
    assert "hunter2" not in ended.stderr + ended.stdout


@pytest.mark.parametrize(("no_color", "is_coloured"), [("", True), ("1", False)])
def test_a_log_on_a_terminal_has_colours_unless_told_not_to(
    no_color: str, is_coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    with redirect_stderr(Terminal()) as terminal:
        configure_logs("info", Secrets([]))
        structlog.get_logger().info("started")
    assert ("\x1b[" in terminal.getvalue()) == is_coloured


def test_what_fails_in_every_step_does_not_fill_the_disk_with_its_log() -> None:
    logging.getLogger().handlers[:] = []
    with redirect_stderr(StringIO()) as out:
        configure_logs("info", Secrets([]))
        for step in range(1_000):
            logging.getLogger("a.drafter").error("no usable logits: %d of %d drafts", step % 4, 4)
        logging.getLogger("a.drafter").error("something else")
    lines = out.getvalue().splitlines()
    assert 1 < len(lines) < 50
    assert "something else" in lines[-1]


def test_how_many_lines_of_a_kind_were_left_out_is_told_in_the_next_minute() -> None:
    now = 0.0
    flood = FloodFilter(lambda: now)

    def told(event: str, *values: int) -> str | None:
        record = logging.LogRecord("a.drafter", logging.ERROR, "", 0, event, values, None)
        return record.getMessage() if flood.filter(record) else None

    shown = [told("%d failed", step) for step in range(25)]
    assert shown == [*(f"{step} failed" for step in range(10)), *[None] * 15]
    assert told("another") == "another"
    now = 61.0
    assert told("%d failed", 25) == "25 failed (15 more of this kind were not logged)"
    assert told("%d failed", 26) == "26 failed"
    assert told("another") == "another"


def test_how_many_were_left_out_is_told_however_long_none_of_that_kind_followed() -> None:
    now = 0.0
    flood = FloodFilter(lambda: now)

    def told(event: str) -> str | None:
        record = logging.LogRecord("a.drafter", logging.ERROR, "", 0, event, (), None)
        return record.getMessage() if flood.filter(record) else None

    for _ in range(25):
        told("failed")
    now = 61.0
    told("another")
    now = 122.0
    told("another")
    now = 183.0
    assert told("failed") == "failed (15 more of this kind were not logged)"


def test_a_log_that_cannot_be_written_ends_nobody_who_logs() -> None:
    """As standard error in a file on a full disk: the thread that sends records logged that, and ended."""
    logging.getLogger().handlers[:] = []
    with Path("/dev/full").open("w", buffering=1) as full, redirect_stderr(full):
        configure_logs("info", Secrets([]))
        structlog.get_logger("test").warning("the spool cannot be written", error="No space left on device")
        logging.getLogger("a.library").error("failed")
        with suppress(OSError):
            full.close()  # which tries once more


def test_a_process_without_standard_error_logs_nothing_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    logging.getLogger().handlers[:] = []
    monkeypatch.setattr(sys, "stderr", None)
    configure_logs("info", Secrets([]))
    structlog.get_logger("test").warning("an event")
    logging.getLogger("a.library").error("failed")

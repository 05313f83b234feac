"""What a browser is shown where there is no page to show."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from driftguard.api.pages import routes
from driftguard.api.pages.rendering import marked, timed
from driftguard.errors import DatabaseUnavailable
from driftguard.store.database import Database
from tests.pipeline.sidecar import running_sidecar

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/streams/999", 404, "there is no stream 999"),
        ("/streams/x", 422, "stream_id: "),
        ("/incidents/7c9e6679-7425-40de-944b-e07fc1f90ae7", 404, "there is no incident 7c9e6679"),
        ("/?sort=x", 422, "sort: "),
        ("/?q=%00", 422, "q: "),
        ("/dashboards/fleet", 404, "alerting.grafana_url is not set"),
        ("/nothing/here", 404, "/nothing/here: not found"),
        ("/runbooks/Nothing", 404, "there is no runbook"),
    ],
)
def test_a_browser_reads_a_page_and_a_program_a_problem(
    database: Database, tmp_path: Path, path: str, status: int, words: str
) -> None:
    with running_sidecar(database, tmp_path) as client:
        page = client.get(path, headers=BROWSER)
        assert (page.status_code, page.headers["content-type"]) == (status, "text/html; charset=utf-8")
        assert words in page.text
        assert '<a href="/">Fleet</a>' in page.text
        assert page.headers["content-security-policy"].startswith("default-src 'none'")
        problem = client.get(path)
        assert (problem.status_code, problem.headers["content-type"]) == (status, "application/problem+json")


def test_a_database_that_is_away_is_told_on_the_page_which_looks_again(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_sidecar(database, tmp_path) as client:
        monkeypatch.setattr(Database, "session", _away)
        page: httpx.Response = client.get("/", headers=BROWSER)
        monkeypatch.undo()
    assert (page.status_code, page.headers["retry-after"]) == (503, "5")
    assert "Database unavailable" in page.text
    assert "nobody answers" in page.text
    assert '<meta http-equiv="refresh" content="5">' in page.text


def _away(self: Database, *_: object, **__: object) -> None:
    raise DatabaseUnavailable("nobody answers")


def test_a_missing_uplot_is_told_in_the_log(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "_HERE", tmp_path)
    with capture_logs() as logged, running_sidecar(database, tmp_path) as client:
        answer = client.get("/static/uPlot.js")
    assert answer.status_code == 404
    assert "install it again" in answer.json()["detail"]
    assert [str(tmp_path / "static" / "uPlot.js")] == [line["file"] for line in logged if "file" in line]


def test_commands_in_a_sentence_are_shown_as_commands() -> None:
    told = "replay the probes (`driftguard probe run --server SERVER`), then <look>"
    assert str(marked(told, server="chat eu")) == (
        "replay the probes (<code>driftguard probe run --server &#39;chat eu&#39;</code>), then &lt;look&gt;"
    )


def test_commands_in_a_sentence_with_times_are_shown_as_commands_too() -> None:
    told = timed("fell since 2026-11-01 10:00:00 UTC; try `driftguard probe run --server '<b>'`, then wait")
    assert "; try <code>driftguard probe run --server &#39;&lt;b&gt;&#39;</code>, then wait" in told
    assert '<time datetime="2026-11-01T10:00:00Z">2026-11-01 10:00:00 UTC</time>' in told

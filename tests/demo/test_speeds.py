"""How the demo compares speeds while the machine does other work."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import numpy as np
import pytest
from rich.console import Console

from driftguard.demo import turns
from driftguard.demo.processes import DemoFailed
from driftguard.demo.report import in_words, summary_table
from driftguard.demo.speeds import change
from driftguard.demo.stages import Facts
from driftguard.demo.traffic import Load, Traffic
from driftguard.demo.turns import SetUp, measure, put_into_service

KNOWN = Load({"code": 1.0}, {"code": "python"})


@contextmanager
def engines(
    seconds: Callable[[str, int], float], tokens: int
) -> Iterator[tuple[list[SetUp], Callable[[], float]]]:
    """Two engines behind one address, and their clock: each request takes so many seconds of it, by the
    engine and the number of the request, and has so many tokens."""
    served, now, lock = [0], [0.0], threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            with lock:
                served[0] += 1
                now[0] += seconds(self.path.split("/")[1], served[0])
            body = json.dumps({"usage": {"completion_tokens": tokens}}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        url = f"http://127.0.0.1:{http.server_port}"
        try:
            yield [SetUp(name, f"{url}/{name}", KNOWN) for name in ("before", "after")], lambda: now[0]
        finally:
            http.shutdown()
            thread.join()


def speeds_of(seconds: Callable[[str, int], float], tokens: int = 64) -> dict[str, list[float]]:
    with engines(seconds, tokens) as (set_ups, clock):
        traffic = Traffic("", KNOWN, seed=5)
        traffic._prompts["python"] = ["def f():"]
        return measure(traffic, set_ups, lambda _: None, clock)


def slower_and_slower(_: str, number: int) -> float:
    """Other work takes more and more of the machine."""
    return 1.0 + 4.0 * number / (2 * turns.REQUESTS * turns.TURNS)


def test_growing_load_is_not_taken_for_a_slower_draft() -> None:
    speeds = speeds_of(slower_and_slower)
    assert speeds["after"][-1] < 0.4 * speeds["before"][0], "one after the other, it would be called slower"
    found = change(speeds["after"], speeds["before"])
    assert not found.conclusive, found
    assert abs(found.value) < 0.05


def test_a_slower_draft_is_told_under_growing_load() -> None:
    speeds = speeds_of(lambda name, number: slower_and_slower(name, number) * (2 if name == "after" else 1))
    found = change(speeds["after"], speeds["before"])
    assert found.low < -0.5 < found.high < -0.4, found


def test_a_turn_without_tokens_is_told() -> None:
    with pytest.raises(DemoFailed, match="no tokens came in turn 0 of the speeds, 'before'"):
        speeds_of(lambda *_: 1.0, tokens=0)


def test_the_interval_holds_the_true_change_as_often_as_it_says() -> None:
    generator = np.random.default_rng(3)
    held = 0
    for _ in range(400):
        load = np.exp(generator.normal(0, 0.5, 8))
        noise = np.exp(generator.normal(0, 0.1, (2, 8)))
        found = change(list(120 * load * noise[0]), list(100 * load * noise[1]))
        held += found.low <= 0.2 <= found.high
    assert 368 <= held <= 391, held  # 380, and 2.6 standard deviations of that


def test_the_end_says_what_the_machine_could_not_tell() -> None:
    speeds = {"before": [100.0, 90.0, 120.0, 80.0], "after": [31.0, 115.0, 99.0, 20.0]}
    facts = Facts(seed=0, tokens_per_second=speeds)
    facts.acceptance = {phase: {"code": 0.6} for phase in speeds}
    facts.changes = {"after": change(speeds["after"], speeds["before"])}
    facts.changes["repair"] = facts.changes["after"]
    facts.changes["speculation"] = change([120.0, 118.0, 125.0, 121.0], [100.0, 99.0, 101.0, 100.0])
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(summary_table(facts, framed=False))
    shown = console.export_text()
    assert "inconclusive (" in shown
    assert shown.isascii()
    speculation, repair, _ = in_words(facts)
    assert "inconclusive on this machine" in repair
    assert "inconclusive" not in speculation
    assert "+2" in speculation


@pytest.mark.parametrize("version", ["release/2", "a?b", "a#b", "v 3"])
def test_a_draft_is_put_into_service_whatever_its_version_is_called(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    asked: list[str] = []

    def post(url: str, **more: object) -> httpx.Response:
        asked.append(httpx.URL(url).path)
        return httpx.Response(200, request=httpx.Request("POST", url))

    serving = {"draft": {"version": "v1"}}
    info = httpx.Response(200, json=serving, request=httpx.Request("GET", "http://engine"))
    monkeypatch.setattr(httpx, "get", lambda url, **more: info)
    monkeypatch.setattr(httpx, "post", post)
    put_into_service("http://engine", version, "/drafts/new")
    assert asked[-1] == f"/admin/drafts/{version}/activate"

"""One server, scraped over real HTTP: what is stored, and what is said where nothing can be."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from driftguard.errors import BadSettings
from driftguard.settings import ScrapingSettings, SourceSettings
from driftguard.sources import scrape as module
from driftguard.sources.scrape import open_client, scrape
from driftguard.sources.source import USUAL_PATHS, Scraped, Source, sources_of
from tests.adapters.fake_engines import (
    ENGINES,
    MODEL,
    FakeBentoMl,
    FakeBuiltInEngine,
    FakeEngine,
    FakeLlamaCpp,
    FakeLmDeploy,
    FakeSGLang,
    FakeTensorRtLlm,
    FakeTgi,
    FakeVllm,
)
from tests.sources.served import Served, ok, served
from tests.sources.stored import Stored
from tests.tls import tls_sidecar

STEPS = [4, 0, 3, 1, 2]  # 10 of 20


@pytest.fixture
def server() -> Iterator[Served]:
    with served() as running:
        yield running


@pytest.fixture
def stored() -> Stored:
    return Stored()


def scraped(source: Source, stored: Stored, timeout_seconds: float = 5.0) -> Scraped:
    async def once() -> Scraped:
        async with open_client(ScrapingSettings(timeout_seconds=timeout_seconds)) as client:
            return await scrape(client, source, stored.submit)

    return asyncio.run(once())


def source_at(url: str, **settings: Any) -> Source:
    return Source.of(SourceSettings(url=url, **settings))


def test_the_first_scrape_waits_the_second_stores_what_came_between(server: Served, stored: Stored) -> None:
    engine = FakeVllm(running=0)
    server.pages["/metrics"] = ok(engine.text)
    source = source_at(server.url, server="chat", draft_version="v3")
    engine.serve([4] * 1_000)
    assert scraped(source, stored).condition == "waiting"
    engine.serve(STEPS)
    assert scraped(source, stored).condition == "reporting"
    assert scraped(source, stored).condition == "idle"
    (record,) = stored.records
    assert (record.server, record.draft_version, record.method) == ("chat", "v3", "unknown")
    assert (record.steps, record.drafted, record.accepted, record.fidelity) == (5, 20, 10, "counter")


@pytest.mark.parametrize(("ran_before", "runs"), [(0, 0), (0, 3), (3, 0), (3, 3)])
def test_a_server_is_stalled_that_makes_no_token_for_requests_that_run_all_the_while(
    server: Served, stored: Stored, ran_before: int, runs: int
) -> None:
    """As a vLLM of which the process with the engine hangs, while that with the API answers. A request that
    has only just begun, or ended, has no token to show."""
    engine = FakeVllm(running=ran_before)
    server.pages["/metrics"] = ok(engine.text)
    source = source_at(server.url)
    scraped(source, stored)
    engine.running = runs
    found = scraped(source, stored)
    assert found.condition == ("stalled" if ran_before and runs else "idle")
    assert ("does its engine hang?" in found.detail) == (found.condition == "stalled")
    engine.serve(STEPS)
    assert scraped(source, stored).condition == "reporting"


def test_what_was_counted_while_scrapes_failed_is_in_the_next_window(server: Served, stored: Stored) -> None:
    engine = FakeVllm()
    server.pages["/metrics"] = ok(engine.text)
    source = source_at(server.url)
    scraped(source, stored)
    for status in (500, 503):
        engine.serve(STEPS)
        server.pages["/metrics"] = lambda status=status: (status, "")  # type: ignore[misc]
        failed = scraped(source, stored)
        assert (failed.condition, failed.detail) == ("unreadable", f"/metrics is answered with {status}")
    server.pages["/metrics"] = ok(engine.text)
    scraped(source, stored)
    assert [record.drafted for record in stored.records] == [40]


@pytest.mark.parametrize("outage", ["is_away", "is_unanswered"])
def test_what_was_counted_while_the_database_was_away_is_stored_once(
    server: Served, stored: Stored, outage: str
) -> None:
    """Also where a window was stored whose commit was not answered."""
    engine = FakeVllm()
    server.pages["/metrics"] = ok(engine.text)
    source = source_at(server.url)
    scraped(source, stored)
    setattr(stored, outage, True)
    for _ in range(3):
        engine.serve(STEPS)
        found = scraped(source, stored)
        assert (found.condition, found.detail) == (
            "reporting",
            "not stored yet: the database cannot be reached",
        )
    setattr(stored, outage, False)
    engine.serve(STEPS)
    scraped(source, stored)
    engine.serve(STEPS)
    scraped(source, stored)
    assert [record.drafted for record in stored.records] == [20, 60, 20]
    for earlier, later in pairwise(stored.records):
        assert later.started_at == earlier.ended_at


def test_a_window_whose_commit_was_not_answered_is_stored_once_where_the_queue_is_full_meanwhile(
    server: Served, stored: Stored
) -> None:
    engine = FakeVllm()
    server.pages["/metrics"] = ok(engine.text)
    source = source_at(server.url)
    scraped(source, stored)
    for outage in ("is_unanswered", "is_full"):
        setattr(stored, outage, True)
        engine.serve(STEPS)
        assert scraped(source, stored).detail.startswith("not stored yet: ")
        setattr(stored, outage, False)
    engine.serve(STEPS)
    scraped(source, stored)
    assert [record.drafted for record in stored.records] == [20, 40]


def test_counts_that_contradict_each_other_are_read_again(server: Served, stored: Stored) -> None:
    engine = FakeVllm()
    server.pages["/metrics"] = ok(engine.text)
    source = source_at(server.url)
    scraped(source, stored)
    engine.serve(STEPS)
    true = engine.text()
    server.pages["/metrics"] = ok(
        lambda: true.replace(
            'accepted_tokens_total{engine="0",model_name="meta/Llama-3.1-8B"} 10',
            'accepted_tokens_total{engine="0",model_name="meta/Llama-3.1-8B"} 21',
        )
    )
    assert "accepted: 21 is more than drafted (20)" in scraped(source, stored).detail
    assert not stored.records
    server.pages["/metrics"] = ok(engine.text)
    scraped(source, stored)
    assert [record.accepted for record in stored.records] == [10]


LABELS = f'engine="0",model_name="{MODEL}"'


def test_a_server_whose_counts_were_printed_while_it_updated_them_is_recorded_again(
    server: Served, stored: Stored
) -> None:
    """A reading that has draft tokens among the accepted ones, but not yet at their positions: the window
    that ends there is stored, and each that begins there contradicts itself, however long it is."""
    engine = FakeVllm()
    server.pages["/metrics"] = ok(engine.text)
    source = source_at(server.url)
    scraped(source, stored)
    engine.serve(STEPS)
    torn = engine.text()
    for place, kept in enumerate((4, 3, 2, 1)):
        name = f'accepted_tokens_per_pos_total{{{LABELS},position="{place}"}}'
        assert f"{name} {kept}\n" in torn
        torn = torn.replace(f"{name} {kept}\n", f"{name} 0\n")
    server.pages["/metrics"] = ok(lambda: torn)
    scraped(source, stored)
    server.pages["/metrics"] = ok(engine.text)
    told = []
    for _ in range(4):
        engine.serve(STEPS)
        told.append(scraped(source, stored).detail)
    why = "accepted_per_position: adds up to {}, more than accepted ({})"
    assert told[:2] == [
        f"no record can hold its counts ({why.format(20, 10)}); they are read again with the next scrape",
        f"a window was left out: no record can hold its counts ({why.format(30, 20)})",
    ]
    assert told[2:] == ["", ""]
    assert [record.accepted for record in stored.records] == [10, 10, 10]


@pytest.mark.parametrize("count", ["1e30", "1e300", "9e12"])
def test_a_count_that_no_record_can_hold_is_named_and_left_out(
    server: Served, stored: Stored, count: str
) -> None:
    engine = FakeVllm()
    server.pages["/metrics"] = ok(engine.text)
    source = source_at(server.url)
    scraped(source, stored)
    name = f"vllm:prompt_tokens_total{{{LABELS}}}"
    server.pages["/metrics"] = ok(
        lambda: re.sub(f"(?m)^{re.escape(name)} .*$", f"{name} {count}", engine.text())
    )
    told = []
    for _ in range(3):
        engine.serve(STEPS)
        told.append(scraped(source, stored).detail)
    assert ["prompt_tokens: expected int <= 1099511627776" in detail for detail in told] == [
        True,
        True,
        False,
    ]
    assert [record.accepted for record in stored.records] == [10]


class Clock:
    """That of the sidecar, which is `ahead` of the true one."""

    ahead = timedelta()

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:
        return datetime.now(tz) + cls.ahead


@pytest.mark.parametrize("kind", [FakeVllm, FakeLlamaCpp])
@pytest.mark.parametrize("drafted_before", [0, 5 * 10**6])
def test_a_sidecar_whose_clock_is_set_back_leaves_one_window_out_and_goes_on(
    server: Served,
    stored: Stored,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[FakeEngine],
    drafted_before: int,
) -> None:
    """From a million draft tokens on windows of llama.cpp go on over several scrapes."""
    monkeypatch.setattr(module, "datetime", Clock)
    engine = kind(steps=drafted_before // 4, drafted=[drafted_before // 4] * 4)
    server.pages["/metrics"] = ok(engine.text)
    source = source_at(server.url, target="t")
    monkeypatch.setattr(Clock, "ahead", timedelta(hours=2))
    scraped(source, stored)
    for _ in range(3):
        engine.serve(STEPS * 50)
        scraped(source, stored)
    known = len(stored.records)
    monkeypatch.setattr(Clock, "ahead", timedelta())
    engine.serve(STEPS * 200)
    found = scraped(source, stored)
    assert found.detail == "a window was left out: the sidecar's clock was set back in it"
    assert len(stored.records) == known
    engine.serve(STEPS * 200)
    assert "clock" not in scraped(source, stored).detail
    (record,) = stored.records[known:]
    assert (record.drafted, record.accepted) == (20 * 200, 10 * 200)
    assert record.ended_at < datetime.now(UTC) + timedelta(minutes=1)


def test_a_clock_that_was_ahead_only_within_a_window_that_goes_on_is_found_out_as_well(
    server: Served, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "datetime", Clock)
    engine = FakeLlamaCpp(steps=1_250_000, drafted=[1_250_000] * 4)
    server.pages["/metrics"] = ok(engine.text)
    source = source_at(server.url, target="t")
    scraped(source, stored)
    monkeypatch.setattr(Clock, "ahead", timedelta(hours=2))
    engine.serve(STEPS * 20)
    scraped(source, stored)
    monkeypatch.setattr(Clock, "ahead", timedelta())
    engine.plain_tokens += 30_000
    assert "clock was set back" in scraped(source, stored).detail
    engine.plain_tokens += 30_000
    found = scraped(source, stored)
    assert (found.condition, len(stored.records)) == ("drafting_stopped", 1)


def test_a_clock_that_is_set_back_while_nothing_is_generated_leaves_nothing_out(
    server: Served, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "datetime", Clock)
    engine = FakeVllm(running=0)
    engine.serve(STEPS)
    server.pages["/metrics"] = ok(engine.text)
    source = source_at(server.url)
    monkeypatch.setattr(Clock, "ahead", timedelta(hours=2))
    scraped(source, stored)
    monkeypatch.setattr(Clock, "ahead", timedelta())
    found = scraped(source, stored)
    assert (found.condition, found.detail) == ("idle", "")
    engine.serve(STEPS)
    scraped(source, stored)
    assert [record.drafted for record in stored.records] == [20]


def test_a_llamacpp_of_millions_of_tokens_is_told_to_be_idle_or_to_have_stopped_drafting_as_any_other(
    server: Served, stored: Stored
) -> None:
    """Its window goes on: it has drafted some tokens, but too few to be stored."""
    engine = FakeLlamaCpp(steps=1_250_000, drafted=[1_250_000] * 4, accepted=[900_000] * 4)
    server.pages["/metrics"] = ok(engine.text)
    source = source_at(server.url, target="t")
    scraped(source, stored)
    engine.serve(STEPS * 20)
    assert scraped(source, stored).condition == "reporting"
    assert scraped(source, stored).condition == "idle"
    engine.plain_tokens += 30_000
    found = scraped(source, stored)
    assert found.condition == "drafting_stopped"
    assert "generated 30,000 tokens without a draft" in found.detail
    (record,) = stored.records
    assert (record.drafted, record.accepted, record.output_tokens) == (0, 0, 30_000)
    engine.serve(STEPS * 200)
    assert scraped(source, stored).condition == "reporting"
    assert [record.drafted for record in stored.records] == [0, 20 * 200]


def test_nothing_listens(stored: Stored) -> None:
    with served() as gone:
        url = gone.url
    found = scraped(source_at(url), stored)
    assert found.condition == "unreachable"
    assert found.detail == f"no connection to {urlsplit(url).netloc}: Connection refused"


def test_a_certificate_that_is_not_trusted_is_told_as_that(tmp_path: Path, stored: Stored) -> None:
    with tls_sidecar(tmp_path) as private:
        found = scraped(source_at(private.url), stored)
    assert found.condition == "unreachable"
    place = urlsplit(private.url).netloc
    assert re.fullmatch(
        f"no connection to {place}: its certificate is not trusted \\(self.signed certificate\\); "
        "SSL_CERT_FILE names whom to trust",
        found.detail,
    )


def test_a_server_without_tls_is_told_from_one_that_is_away(server: Served, stored: Stored) -> None:
    found = scraped(source_at(server.url.replace("http://", "https://")), stored)
    assert found.condition == "unreachable"
    assert ": TLS failed (" in found.detail


def test_servers_that_hang_hold_up_no_other(server: Served, stored: Stored) -> None:
    server.pages["/metrics"] = ok(FakeVllm(steps=1).text)
    source = source_at(f"{server.url}/metrics")

    async def beside(url: str) -> str:
        async with open_client(ScrapingSettings(timeout_seconds=600.0)) as client:
            hanging = [
                asyncio.ensure_future(scrape(client, source_at(url), stored.submit)) for _ in range(120)
            ]
            await asyncio.sleep(0)  # all have asked
            found = await scrape(client, source, stored.submit)
            assert not any(task.done() for task in hanging)
            for task in hanging:
                task.cancel()
            await asyncio.gather(*hanging, return_exceptions=True)
            return found.condition

    with socket.create_server(("127.0.0.1", 0), backlog=128) as silent:  # it never answers
        assert asyncio.run(beside(f"http://127.0.0.1:{silent.getsockname()[1]}/metrics")) == "waiting"


def test_a_server_that_hangs_is_given_up(server: Served, stored: Stored) -> None:
    release = threading.Event()

    def hang() -> tuple[int, str]:
        release.wait()
        return 200, ""

    server.pages["/metrics"] = hang
    found = scraped(source_at(server.url, kind="vllm"), stored, timeout_seconds=0.1)
    release.set()
    assert (found.condition, found.detail) == ("unreachable", "no answer within scraping.timeout_seconds")


@pytest.mark.parametrize("make", ENGINES, ids=lambda make: make.kind)
def test_hidden_metrics_are_told_with_what_shows_them(
    server: Served, stored: Stored, make: type[FakeEngine]
) -> None:
    source = source_at(server.url, kind=make.kind)
    assert source.adapter is not None
    found = scraped(source, stored)
    assert found.condition == "metrics_hidden"
    assert source.adapter.show_metrics in found.detail
    server.pages[make.path] = ok(lambda: "python_info 1\nprocess_start_time_seconds 1\n")
    found = scraped(source, stored)
    assert (found.condition, source.adapter.show_metrics in found.detail) == ("metrics_hidden", True)


def test_a_server_of_another_engine_than_the_settings_say_is_told_so(server: Served, stored: Stored) -> None:
    server.pages["/metrics"] = ok(FakeVllm().text)
    found = scraped(source_at(server.url, kind="sglang"), stored)
    said = "its metrics are of vLLM, not of SGLang: set `kind` to vllm, or leave it out"
    assert (found.condition, found.detail) == ("metrics_hidden", said)


def test_no_speculation_is_told_with_what_turns_it_on(server: Served, stored: Stored) -> None:
    server.pages["/metrics"] = ok(lambda: 'vllm:generation_tokens_total{model_name="m"} 7\n')
    found = scraped(source_at(server.url), stored)
    assert found.condition == "not_speculating"
    assert "--speculative-config" in found.detail


def of_a_start_without_speculation(engine: FakeVllm) -> str:
    return "".join(line for line in engine.text().splitlines(keepends=True) if "spec_decode" not in line)


def test_a_worker_that_its_router_does_not_reach_for_a_while_counts_on_from_there(
    server: Served, stored: Stored
) -> None:
    """SGLang's router prints the metrics of all workers that answer it."""
    workers = [FakeSGLang(), FakeSGLang()]
    reached = [0, 1]

    def text() -> str:
        labelled = (workers[n].text().replace("{", f'{{worker_addr="http://{n}",') for n in reached)
        return "".join(labelled)

    server.pages["/metrics"] = ok(text)
    source = source_at(server.url)
    for worker in workers:
        worker.serve(STEPS * 100)
    scraped(source, stored)
    for reached[:] in ([0], [0], [0, 1]):
        for worker in workers:
            worker.serve(STEPS)
        scraped(source, stored)
    assert [record.drafted for record in stored.records] == [20, 20, 20 + 3 * 20]


def test_a_counter_that_a_restart_took_away_is_no_second_restart_once_it_is_back(
    server: Served, stored: Stored
) -> None:
    """SGLang counts tokens by whether they are streamed, and prints each count from its first one on."""

    def text(verified: int, streamed: int, whole: int | None) -> str:
        labels = f'{{model_name="{MODEL}"'
        tokens = f"sglang:generation_tokens_total{labels},is_streaming="
        return (
            f"sglang:spec_num_draft_tokens{labels}}} 5\nsglang:spec_accept_length{labels}}} 2\n"
            f'sglang:spec_verify_calls_total{labels}}} {verified}\n{tokens}"true"}} {streamed}\n'
        ) + ("" if whole is None else f'{tokens}"false"}} {whole}\n')

    source = source_at(server.url)
    for page in (text(900, 1_000, 800), text(10, 20, None), text(15, 20, 10), text(15, 20, 10)):
        server.pages["/metrics"] = ok(lambda page=page: page)  # type: ignore[misc]
        scraped(source, stored)
    assert [(record.steps, record.accepted) for record in stored.records] == [(10, 10), (5, 5)]


def test_a_bentoml_that_does_not_reach_its_vllm_for_a_while_counts_on_from_there(
    server: Served, stored: Stored
) -> None:
    engine = FakeBentoMl()
    server.pages["/metrics"] = ok(engine.text)
    source = source_at(server.url)
    engine.serve(STEPS * 100)
    scraped(source, stored)
    engine.serve(STEPS)
    server.pages["/metrics"] = ok(lambda: engine.text().splitlines()[0])
    found = scraped(source, stored)
    assert found.condition == "metrics_hidden"
    assert "let the service append the metrics of its vLLM" in found.detail
    engine.serve(STEPS)
    server.pages["/metrics"] = ok(engine.text)
    scraped(source, stored)
    assert [record.drafted for record in stored.records] == [40]


def test_a_server_started_again_without_speculation_has_stopped_drafting(
    server: Served, stored: Stored
) -> None:
    """A vLLM so started has no counters of drafts at all."""
    engine = FakeVllm(running=0)
    server.pages["/metrics"] = ok(engine.text)
    source = source_at(server.url)
    scraped(source, stored)
    engine.serve(STEPS)
    scraped(source, stored)
    engine.restart(at=engine.started_at + 3_600)
    engine.running, engine.plain_tokens = 0, 500
    server.pages["/metrics"] = ok(lambda: of_a_start_without_speculation(engine))
    found = scraped(source, stored)
    assert found.condition == "drafting_stopped"
    assert found.detail == (
        "vLLM generated 500 tokens without a draft since the last window, and has not drafted since it "
        "started; start vLLM with --speculative-config"
    )
    window = stored.records[-1]
    assert (window.target, window.drafted, window.steps, window.output_tokens) == (MODEL, 0, 0, 500)
    assert scraped(source, stored).condition == "idle"


def test_a_tensorrt_llm_started_again_without_speculation_goes_on_in_its_stream(
    server: Served, stored: Stored
) -> None:
    """So started it counts no drafts, and names neither draft nor method."""
    engine = FakeTensorRtLlm()
    server.pages[engine.path] = ok(engine.text)
    source = source_at(server.url)
    scraped(source, stored)
    engine.serve(STEPS)
    scraped(source, stored)
    engine.restart(at=engine.started_at + 3_600)
    for tokens in (3, 500):
        engine.plain_tokens = tokens
        plain = "\n".join(line for line in engine.text().splitlines() if "spec" not in line)
        server.pages[engine.path] = ok(plain.__str__)
        found = scraped(source, stored)
        assert found.condition == "drafting_stopped"
        assert "has not drafted since it started; set speculative_config" in found.detail
    first, *later = stored.records
    assert [(one.drafted, one.output_tokens) for one in later] == [(0, 3), (0, 497)]
    assert {(one.stream_key, one.draft) for one in later} == {(first.stream_key, "org/eagle3")}


@pytest.mark.parametrize("kind", [FakeVllm, FakeLlamaCpp])
def test_several_servers_that_answer_in_turns_are_told_and_make_no_windows(
    server: Served, stored: Stored, monkeypatch: pytest.MonkeyPatch, kind: type[FakeEngine]
) -> None:
    """As behind a load balancer. Each reading looks like a restart, so that a window would hold all that the
    other one has counted since its start. llama.cpp's answers tell that, not its metrics."""
    engines = [kind(started_at=1_750_000_000.0 + 600 * number) for number in range(2)]
    source = source_at(server.url, target="t")

    def scraped_from(engine: FakeEngine) -> Scraped:
        server.pages["/metrics"] = ok(engine.text)
        if kind is FakeLlamaCpp:
            server.headers["Process-Start-Time-Unix"] = f"{engine.started_at:.0f}"
        engine.serve(STEPS)
        return scraped(source, stored)

    for engine in engines:
        scraped_from(engine)
    known = len(stored.records)  # the second may be the first one, restarted
    found = [scraped_from(engines[number]) for number in (0, 1, 1, 0)]
    assert [one.condition for one in found] == ["incomplete"] * 4
    assert all("give each a source of its own" in one.detail for one in found)
    assert len(stored.records) == known
    monkeypatch.setattr(module, "TURNS_FOR", timedelta())  # that long after the last turn
    assert scraped_from(engines[0]).condition == "reporting"
    (record,) = stored.records[known:]
    assert record.steps == len(STEPS)


def test_restarts_in_a_row_are_of_one_server(server: Served, stored: Stored) -> None:
    engine = FakeVllm()
    server.pages["/metrics"] = ok(engine.text)
    source = source_at(server.url)
    scraped(source, stored)
    for _ in range(3):
        engine.restart(at=engine.started_at + 60)
        engine.serve(STEPS)
        assert scraped(source, stored).condition == "reporting"


def test_the_engine_is_found_where_tensorrt_llm_hides_it(server: Served, stored: Stored) -> None:
    engine = FakeTensorRtLlm()
    server.pages |= {"/prometheus/metrics": ok(engine.text), "/metrics": ok(lambda: '[{"iter": 1}]')}
    source = source_at(server.url)
    assert scraped(source, stored).condition == "waiting"
    engine.serve(STEPS)
    assert scraped(source, stored).condition == "reporting"
    assert source.kind == "tensorrt_llm"
    asked = {path for path, _ in server.asked} - {"/version"}
    assert asked == {"/prometheus/metrics"}, "what is read of its JSON is lost"


def test_another_engine_behind_the_address_begins_anew(server: Served, stored: Stored) -> None:
    engine = FakeVllm()
    engine.serve(STEPS)
    server.pages["/metrics"] = ok(engine.text)
    source = source_at(server.url, target="t")
    scraped(source, stored)
    other = FakeLlamaCpp()
    other.serve(STEPS)
    server.pages["/metrics"] = ok(other.text)
    assert scraped(source, stored).condition == "waiting"
    other.serve(STEPS)
    assert scraped(source, stored).condition == "reporting"
    assert [record.drafted for record in stored.records] == [20]


def test_a_server_whose_metrics_name_no_model_is_asked_for_it(server: Served, stored: Stored) -> None:
    engine = FakeLlamaCpp()
    engine.serve(STEPS)
    server.pages["/metrics"] = ok(engine.text)
    source = source_at(server.url)
    found = scraped(source, stored)
    assert found.condition == "incomplete"
    assert "set `target`" in found.detail
    server.pages["/v1/models"] = ok(lambda: "[" * 100_000)
    assert scraped(source, stored).condition == "incomplete"
    server.pages["/v1/models"] = ok(lambda: '{"object": "list", "data": [{"id": "qwen.gguf"}]}')
    assert scraped(source, stored).condition == "waiting"
    engine.serve(STEPS)
    scraped(source, stored)
    assert [record.target for record in stored.records] == ["qwen.gguf"]


@pytest.mark.parametrize("kind", [FakeLlamaCpp, FakeTgi])
@pytest.mark.parametrize("seen", ["it did not answer", "its counters fell", "another sidecar scraped it"])
def test_a_server_that_comes_back_with_another_model_is_recorded_under_that_one(
    server: Served, stored: Stored, kind: type[FakeEngine], seen: str
) -> None:
    engine, model = kind(), "old.gguf"
    engine.serve(STEPS)
    pages = {"/metrics": ok(engine.text), "/v1/models": ok(lambda: f'{{"data": [{{"id": "{model}"}}]}}')}
    server.pages |= pages
    source = source_at(server.url, num_speculative_tokens=4)
    scraped(source, stored)
    engine.serve(STEPS * 2)
    scraped(source, stored)
    if seen == "it did not answer":
        server.pages.clear()
        assert scraped(source, stored).condition == "metrics_hidden"
    elif seen == "another sidecar scraped it":
        source.before = None  # as the loop does with every new lease
    engine.restart(at=0.0)
    engine.serve(STEPS)
    model = "new.gguf"
    server.pages |= pages
    scraped(source, stored)
    engine.serve(STEPS)
    scraped(source, stored)
    first, *later = stored.records
    assert (first.target, {record.target for record in later}) == ("old.gguf", {"new.gguf"})
    assert [path for path, _ in server.asked].count("/v1/models") == 2, "asked once for each run"


def test_a_restart_of_llamacpp_shows_though_it_has_counted_more_since(server: Served, stored: Stored) -> None:
    """Its answers, not its metrics, tell when it began: in microseconds of a clock that is not UTC's."""
    engine = FakeLlamaCpp()
    engine.serve(STEPS)
    server.pages["/metrics"] = ok(engine.text)
    source = source_at(server.url, target="t")
    server.headers["Process-Start-Time-Unix"] = "25874493180"
    scraped(source, stored)
    scraped(source, stored)
    engine.restart(at=0.0)
    engine.serve(STEPS * 2)
    server.headers["Process-Start-Time-Unix"] = "25990150644"
    scraped(source, stored)
    engine.serve(STEPS)
    scraped(source, stored)
    assert [record.drafted for record in stored.records] == [40, 20]


def test_a_restart_does_not_undo_the_model_that_the_settings_name(server: Served, stored: Stored) -> None:
    engine = FakeLlamaCpp()
    engine.serve(STEPS * 2)
    server.pages["/metrics"] = ok(engine.text)
    source = source_at(server.url, target="as we call it")
    scraped(source, stored)
    engine.restart(at=0.0)
    engine.serve(STEPS)
    scraped(source, stored)
    assert [record.target for record in stored.records] == ["as we call it"]
    assert "/v1/models" not in {path for path, _ in server.asked}


def test_a_router_is_asked_for_one_model(server: Served, stored: Stored) -> None:
    server.pages["/metrics?model=small"] = ok(FakeLlamaCpp(steps=1).text)
    scraped(source_at(f"{server.url}?model=small", target="small"), stored)
    assert [path for path, _ in server.asked[1:]] == ["/metrics?model=small", "/props?model=small"]


def test_a_key_is_sent_and_not_shown(server: Served, stored: Stored) -> None:
    server.pages["/metrics"] = lambda: (401, "")
    source = source_at(server.url.replace("//", "//user:secret@"), api_key="k-1\n")
    found = scraped(source, stored)
    assert (found.condition, "set `api_key`" in found.detail) == ("unreadable", True)
    assert {key for _, key in server.asked} == {"Bearer k-1"}
    assert "secret" not in source.shown_url + source.identity.server


def test_a_proxy_is_taken_as_the_environment_says(
    server: Served, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", server.url.removeprefix("http://"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server.pages["http://chat.invalid/metrics"] = ok(FakeVllm(steps=1).text)
    assert scraped(source_at("http://chat.invalid/metrics"), stored).condition == "waiting"
    assert scraped(source_at(server.url), stored).condition == "metrics_hidden"
    through = [path for path, _ in server.asked]
    assert through == ["http://chat.invalid/metrics", "http://chat.invalid/version", *USUAL_PATHS]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_no_proxy_is_asked_for_a_server_on_the_same_machine(
    server: Served, stored: Stored, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """To the proxy of a company, its address means the proxy itself."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    server.pages["/metrics"] = ok(FakeVllm(steps=1).text)
    url = server.url.replace("127.0.0.1", host)
    assert scraped(source_at(url), stored).condition == "waiting"


def test_an_endless_answer_is_cut(server: Served, stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 1_000)
    server.pages["/metrics"] = ok(lambda: "vllm:x 1\n" * 1_000)
    found = scraped(source_at(server.url), stored)
    assert (found.condition, found.detail) == ("unreadable", "more than 1,000 bytes")


@pytest.mark.parametrize("text", ["", "<html>", "\x00\xff", "vllm:spec_decode_num_drafts_total{ 1"])
def test_whatever_a_server_answers_is_told(server: Served, stored: Stored, text: str) -> None:
    server.pages["/metrics"] = ok(lambda: text)
    assert scraped(source_at(server.url), stored).condition in ("metrics_hidden", "unreadable")


def test_an_unknown_kind_and_two_of_one_name_are_refused() -> None:
    with pytest.raises(BadSettings, match="'tgl' is not a supported kind of server; use one of bentoml"):
        sources_of([SourceSettings(url="http://a", kind="tgl")])
    with pytest.raises(BadSettings, match=r"two are called 'a:1'"):
        sources_of([SourceSettings(url="http://a:1/metrics"), SourceSettings(url="http://a:1/other")])


@pytest.mark.parametrize("kind", [FakeVllm, FakeLlamaCpp, FakeSGLang, FakeTgi, FakeBuiltInEngine])
def test_the_queue_is_in_the_window(server: Served, stored: Stored, kind: type[FakeEngine]) -> None:
    engine = kind()
    engine.serve(STEPS)
    server.pages[engine.path] = ok(engine.text)
    source = source_at(server.url, target="t", num_speculative_tokens=4)
    scraped(source, stored)
    engine.serve(STEPS)
    engine.waiting = 7
    scraped(source, stored)
    assert [record.waiting_requests for record in stored.records] == [7]


@pytest.mark.parametrize(
    "kind", [FakeVllm, FakeSGLang, FakeTensorRtLlm, FakeTgi, FakeLmDeploy, FakeBuiltInEngine]
)
def test_the_requests_that_started_are_in_the_window(
    server: Served, stored: Stored, kind: type[FakeEngine]
) -> None:
    engine = kind()
    engine.serve(STEPS)
    server.pages[engine.path] = ok(engine.text)
    source = source_at(server.url, target="t", num_speculative_tokens=4)
    scraped(source, stored)
    before = engine.requests
    engine.serve(STEPS)
    scraped(source, stored)
    assert [record.started_requests for record in stored.records] == [engine.requests - before]


@pytest.mark.parametrize(
    ("kind", "path", "answer", "version"),
    [
        (FakeVllm, "/version", '{"version": "0.32.0"}', "0.32.0"),
        (FakeLlamaCpp, "/props", '{"build_info": "b11434-00dc8057", "total_slots": 4}', "b11434-00dc8057"),
        (FakeSGLang, "/server_info", '{"version": "0.5.23", "tp_size": 1}', "0.5.23"),
        (FakeSGLang, "/get_server_info", '{"version": "0.5.9"}', "0.5.9"),
        (FakeTgi, "/info", '{"version": "3.3.4", "sha": "x"}', "3.3.4"),
        (FakeVllm, "/version", "<html>", None),
        (FakeVllm, "/version", '{"version": 3}', None),
        (FakeVllm, "/other", "{}", None),
    ],
)
def test_the_version_is_asked_for_where_the_engine_tells_it(
    server: Served, stored: Stored, kind: type[FakeEngine], path: str, answer: str, version: str | None
) -> None:
    engine = kind()
    server.pages |= {engine.path: ok(engine.text), path: lambda: (200, answer)}
    source = source_at(server.url, target="t", num_speculative_tokens=4, api_key="k")
    assert scraped(source, stored).condition in ("waiting", "not_speculating")
    assert source.version == version
    assert {key for _, key in server.asked} == {"Bearer k"}


def test_the_version_is_asked_for_again_after_a_restart_and_not_with_every_scrape(
    server: Served, stored: Stored
) -> None:
    engine = FakeVllm()
    engine.serve(STEPS)
    version = "0.31.0"
    server.pages |= {"/metrics": ok(engine.text), "/version": lambda: (200, f'{{"version": "{version}"}}')}
    source = source_at(server.url)
    for _ in range(3):
        scraped(source, stored)
    assert [path for path, _ in server.asked].count("/version") == 1
    version = "0.32.0"
    engine.restart(at=engine.started_at + 3_600)
    scraped(source, stored)
    assert source.version == "0.32.0"
    version = "0.33.0"
    server.pages["/metrics"] = lambda: (500, "")  # it may come back as another
    scraped(source, stored)
    server.pages["/metrics"] = ok(engine.text)
    scraped(source, stored)
    assert source.version == "0.33.0"


def test_no_version_is_asked_of_the_root_of_a_gateway(server: Served, stored: Stored) -> None:
    engine = FakeVllm()
    server.pages |= {"/chat/metrics": ok(engine.text), "/version": lambda: (200, '{"version": "1"}')}
    source = source_at(f"{server.url}/chat/metrics")
    assert scraped(source, stored).condition in ("waiting", "not_speculating")
    assert source.version is None


def test_a_web_page_in_place_of_metrics_is_told_as_one(server: Served, stored: Stored) -> None:
    """As a login or a proxy in front of the server answers."""
    page = "\n<!DOCTYPE html><html><body>Log in</body></html>"
    server.pages = dict.fromkeys(USUAL_PATHS, ok(lambda: page))
    found = scraped(source_at(server.url), stored)
    assert (found.condition, "a web page, not with metrics" in found.detail) == ("metrics_hidden", True)
    given = scraped(source_at(server.url, kind="vllm"), stored)
    assert given.detail == found.detail

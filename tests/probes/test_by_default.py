"""Probes without any setting: which servers are asked, what is said of it, and that they are no traffic."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import select, update
from typer.testing import CliRunner

from driftguard import cli
from driftguard.app import Sidecar, create_app
from driftguard.metrics import Metrics
from driftguard.probes import loop as loop_module
from driftguard.probes.loop import Probed, ProbeLoop
from driftguard.probes.target import targets_of
from driftguard.records.documents.diagnosis import Diagnosis
from driftguard.records.documents.incident import IncidentDiagnosis, SeenEvidence
from driftguard.settings import ProbeSettings, Settings
from driftguard.store.database import Database
from driftguard.store.partitions import ensure_days
from driftguard.store.probe_lock import replaying
from driftguard.store.tables import Incident, Record, Stream
from tests.adapters.fake_engines import FakeVllm
from tests.alerting.http_receiver import wait_until
from tests.alerting.incident_rows import add_incident
from tests.api.ingest_server import serving
from tests.pipeline.traffic import Traffic, store
from tests.probes.servers import Stub, answer, stub_server

USUAL = 16  # prompts of the usual set


@pytest.fixture
def stub() -> Iterator[Stub]:
    with stub_server() as serving_stub:
        serving_stub.owner = "vllm"
        yield serving_stub


@pytest.fixture
def known(database: Database) -> Database:
    """The server chat has traffic."""
    store(database, Traffic(seed=1).draw(3, {"code": 0.7}))
    return database


def settings_of(**groups: Any) -> Settings:
    return Settings.model_validate({"probes": {"pause_seconds": 0}, **groups})


def looked(database: Database, settings: Settings, looks: int = 1) -> ProbeLoop:
    loop = ProbeLoop(database, settings.probes, targets_of(settings), Metrics())
    for _ in range(looks):
        loop.look()
    return loop


def only(states: Sequence[Probed]) -> Probed:
    (one,) = states
    return one


def records(database: Database, kind: str) -> list[Record]:
    with database.session() as session:
        return list(session.scalars(select(Record).where(Record.kind == kind).order_by(Record.seq)))


@pytest.mark.parametrize(
    ("groups", "asked"),
    [
        ({"sources": [{"url": "http://a:8000", "server": "chat"}]}, [("chat", "http://a:8000", None)]),
        ({"sources": [{"url": "http://a:8000/metrics", "api_key": "k"}]}, [("a:8000", "http://a:8000", "k")]),
        ({"sources": [{"url": "http://u:p@a:8000/metrics"}]}, [("a:8000", "http://u:p@a:8000", None)]),
        ({"sources": [{"url": "http://a:9/chat/metrics"}]}, []),  # a gateway: its root is another server
        ({"proxy": {"upstream": "http://a:1", "upstream_api_key": "k"}}, [("a:1", "http://a:1", "k")]),
        ({"proxy": {"upstream": "http://a:1", "method": "none"}}, []),  # it does not speculate
        ({"engines": [{"server": "own", "admin_url": "http://a:2"}]}, [("own", "http://a:2", None)]),
        (
            {
                "sources": [{"url": "http://a:8000", "server": "chat"}],
                "proxy": {"upstream": "http://b:1", "server": "chat"},
                "probes": {"targets": [{"server": "chat", "url": "http://c:1"}]},
            },
            [("chat", "http://c:1", None)],  # what is said comes first, and a server is asked once
        ),
        ({"probes": {"enabled": False}, "sources": [{"url": "http://a:8000"}]}, []),
        ({}, []),
    ],
)
def test_a_server_is_asked_where_its_address_is_known(
    groups: dict[str, Any], asked: list[tuple[str, str, str | None]]
) -> None:
    found = [target.asked for target in targets_of(Settings.model_validate(groups))]
    assert [
        (one.server, one.url, one.api_key.get_secret_value() if one.api_key else None) for one in found
    ] == asked


def test_a_scraped_server_is_probed_with_the_usual_prompts_and_the_status_says_it(
    known: Database, stub: Stub
) -> None:
    loop = looked(known, settings_of(sources=[{"url": stub.url, "server": "chat"}]), looks=3)
    told = only(loop.states())
    assert (told.state, told.server, told.url, told.interval_seconds) == ("asked", "chat", stub.url, 3_600.0)
    assert told.replayed_at is not None
    assert "32 requests every 60 min, at most 2,048 tokens of answers" in told.detail
    probes = records(known, "probe")
    assert len(probes) == 2 * USUAL  # once, although it was looked three times
    assert {path for path, _, _ in stub.asked} == {"/v1/chat/completions"}
    assert max(len(str(body["messages"])) for _, body, _ in stub.asked) > 2_000  # long ones too
    assert len({str(body["messages"])[:60] for _, body, _ in stub.asked}) == USUAL  # no common beginning


def test_probes_go_on_and_once_an_interval_after_a_clock_was_set_back(known: Database, stub: Stub) -> None:
    loop = looked(known, settings_of(sources=[{"url": stub.url, "server": "chat"}]))
    ahead = datetime.now(UTC) + timedelta(days=2)
    with known.session() as session:
        ensure_days(session, [ahead.date()])
        session.execute(update(Record).where(Record.kind == "probe").values(ended_at=ahead))
    loop._kept["chat"].looked_at = ahead
    assert loop.look()
    loop._kept["chat"].looked_at = None
    assert not loop.look()


def test_while_its_first_probes_are_asked_a_server_is_not_told_to_have_no_traffic(
    known: Database, stub: Stub
) -> None:
    """It may take minutes on a busy server."""
    settings = settings_of(sources=[{"url": stub.url, "server": "chat"}])
    loop = ProbeLoop(known, settings.probes, targets_of(settings), Metrics())
    seen: list[Probed] = []

    def body(_request: dict[str, Any]) -> object:
        seen.append(only(loop.states()))
        return answer()

    stub.body = body
    loop.look()
    assert {(told.state, told.detail) for told in seen} == {
        ("waiting", "its probes are asked for the first time")
    }


def test_a_server_without_a_chat_template_or_with_short_contexts_is_asked_what_it_takes(
    known: Database, stub: Stub
) -> None:
    def body(request: dict[str, Any]) -> object:
        if "messages" in request:
            return 400, {"error": {"message": "no chat template is defined"}}
        if len(request["prompt"]) > 1_000:
            return 400, {"error": {"message": "the maximum context length is 256 tokens"}}
        return answer()

    stub.body = body
    settings = settings_of(sources=[{"url": stub.url, "server": "chat"}])
    assert only(looked(known, settings).states()).state == "asked"
    assert 8 <= len(records(known, "probe")) / 2 < USUAL
    assert "messages" not in stub.asked[-1][1]


@pytest.mark.parametrize(
    ("changed", "reason", "gets"),
    [
        ({"models_status": 401}, "answered /v1/models with 401", 1),
        ({"models_status": 404}, "no OpenAI-compatible API", 1),
        (
            {"owner": "openai"},
            "no engine whose answers are known to tell",
            1,
        ),  # and is not asked: it may cost
        ({"status": 401, "body": {"error": {"message": "Unauthorized"}}}, "with 401: Unauthorized", None),
        ({"body": answer(None)}, "--per-request-spec-decode-metrics summary", None),
    ],
)
def test_a_server_that_refuses_is_left_alone_and_the_reason_is_said_once(
    known: Database,
    stub: Stub,
    changed: dict[str, Any],
    reason: str,
    gets: int | None,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, value in changed.items():
        setattr(stub, name, value)
    settings = settings_of(sources=[{"url": stub.url, "server": "chat"}])
    loop = looked(known, settings, looks=5)
    told = only(loop.states())
    assert told.state == "refused"
    assert reason in told.detail
    if "401" in reason:
        assert "api_key" in told.detail
    assert len(stub.asked) <= 1
    if gets is not None:
        assert (len(stub.got), stub.asked) == (gets, [])
    assert capfd.readouterr().out.count("canary probes were not replayed") <= 1
    assert records(known, "probe") == []


def test_a_key_of_the_source_is_given_and_the_answer_to_a_wrong_one_is_not_repeated(
    known: Database, stub: Stub
) -> None:
    settings = settings_of(sources=[{"url": stub.url, "server": "chat", "api_key": "sk-secret"}])
    looked(known, settings)
    assert {headers["Authorization"] for _, _, headers in stub.asked} == {"Bearer sk-secret"}
    assert {headers["X-DriftGuard-Segment"] for _, _, headers in stub.asked} == {"driftguard-probe"}


def test_no_server_is_asked_before_it_has_traffic_nor_again_while_it_has_none(
    database: Database, stub: Stub
) -> None:
    settings = settings_of(sources=[{"url": stub.url, "server": "chat"}])
    settings = settings.model_copy(update={"probes": ProbeSettings(pause_seconds=0, interval_seconds=0.01)})
    loop = looked(database, settings)
    assert (only(loop.states()).state, stub.got) == ("waiting", [])
    store(database, Traffic(seed=1).draw(3, {"code": 0.7}))
    looked(database, settings)
    asked = len(stub.asked)
    assert asked > 0
    time.sleep(0.02)
    looked(database, settings)
    assert len(stub.asked) == asked  # it would keep a server awake that sleeps while nobody asks
    with database.session() as session:
        session.scalars(select(Stream)).one().traffic_arrived_at = datetime.now(UTC) + timedelta(seconds=1)
    looked(database, settings)
    assert len(stub.asked) == asked + 2 * USUAL


def test_a_sidecar_that_starts_again_says_when_probes_were_replayed(known: Database, stub: Stub) -> None:
    settings = settings_of(sources=[{"url": stub.url, "server": "chat"}])
    looked(known, settings)
    again = only(looked(known, settings).states())
    assert again.state == "waiting"
    assert re.fullmatch(
        r"last asked at 20\S+ \S+ UTC, due again at 20\S+ \S+ UTC if traffic arrives", again.detail
    )


def test_a_server_that_another_sidecar_scrapes_is_probed_by_that_one(known: Database, stub: Stub) -> None:
    settings = settings_of(sources=[{"url": stub.url, "server": "chat"}])
    loop = ProbeLoop(
        known, settings.probes, targets_of(settings), Metrics(), is_elsewhere=lambda server: server == "chat"
    )
    loop.look()
    assert only(loop.states()).state == "waiting"
    assert "another sidecar" in only(loop.states()).detail
    assert stub.got == []


@pytest.mark.parametrize("clock", [timedelta(), -timedelta(days=1)], ids=["right", "behind"])
def test_a_server_whose_diagnosis_waits_is_asked_at_once_and_no_other(
    database: Database, stub: Stub, clock: timedelta
) -> None:
    traffic = Traffic(seed=1).draw(6, {"code": 0.7})
    store(database, [msgspec.structs.replace(one, server="ab"[n % 2]) for n, one in enumerate(traffic)])
    sources = [{"url": stub.url, "server": name} for name in "ab"]
    loop = looked(database, settings_of(sources=sources), looks=3)
    assert [one.state for one in loop.states()] == ["asked", "asked"]
    with database.session() as session:
        stream = session.scalars(select(Stream).where(Stream.server == "b")).one()
    in_ten_minutes = datetime.now(UTC) + timedelta(minutes=10)
    add_incident(database, [], stream_id=stream.id, opened_at=in_ten_minutes)
    awaiting = Diagnosis(
        cause="unknown",
        confidence="low",
        summary="",
        reason="",
        facts=(),
        missing=(),
        recommended_action="",
        retrain=False,
        awaits_probes=True,
    )
    with database.session() as session:
        incident = session.scalars(select(Incident)).one()
        incident.change_point_at = in_ten_minutes + clock
        incident.diagnosis = IncidentDiagnosis.of(awaiting, datetime.now(UTC), SeenEvidence(0, 0))
    before = len(records(database, "probe"))
    assert loop.look()
    assert {one.stream_id for one in records(database, "probe")[before:]} == {stream.id}


def test_two_processes_do_not_probe_a_server_at_once(
    known: Database, stub: Stub, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of two sidecars on one database the second says so while it lasts, and then when probes are due again:
    it warns of nothing, and calls nothing refused."""
    settings = settings_of(engines=[{"server": "chat", "admin_url": stub.url}])
    with replaying(known, "chat"):
        second = looked(known, settings, looks=2)
    told = only(second.states())
    assert (told.state, stub.got) == ("waiting", [])
    assert "another process" in told.detail
    assert only(looked(known, settings).states()).state == "asked"
    second._kept["chat"].failed_at = second._kept["chat"].looked_at = None  # a minute later
    second.look()
    told = only(second.states())
    assert (told.state, told.detail.split(" at ")[0]) == ("waiting", "last asked")
    assert "were not replayed" not in capfd.readouterr().out


@pytest.mark.slow
def test_the_tokens_of_probes_are_in_no_window_of_the_scraped_counters(
    database: Database, tmp_path: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users' drafts are all accepted, those of probes never: no window may hold a rejected one."""
    monkeypatch.setattr(loop_module, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(loop_module, "LOOK_AGAIN", timedelta(0))
    engine = FakeVllm()
    engine.serve([4] * 100)

    def text() -> str:
        engine.serve([4] * 10)
        return engine.text()

    def body(_: dict[str, Any]) -> object:
        engine.serve([0] * 5)
        time.sleep(0.1)
        return answer()

    stub.metrics, stub.body = text, body
    settings = Settings.model_validate(
        {
            "data_dir": tmp_path,
            "sources": [{"url": stub.url, "server": "chat"}],
            "scraping": {"interval_seconds": 1.0},
            "probes": {"pause_seconds": 0.0},
        }
    )
    with serving(create_app(Sidecar(settings, database, "http://sidecar"))) as client:

        def answered() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = client.get("/api/v1/status").json()["probes"]
            return [one for one in found if one["state"] == "asked"]

        wait_until(lambda: bool(answered()), "a replay")
        after = len(records(database, "window"))
        wait_until(lambda: len(records(database, "window")) >= after + 2, "windows after it")
        printed = CliRunner().invoke(cli.app, ["status", "--sidecar", str(client.base_url)]).output
        page = client.get("/").text
    assert f"probes of chat at {stub.url}: asked" in " ".join(printed.split())
    assert "Canary probes</h2>" in page
    assert "32 requests every 60 min" in page
    assert records(database, "probe")
    windows = records(database, "window")
    assert len(windows) >= 2
    assert sum(one.accepted for one in windows) == sum(one.drafted for one in windows)


@pytest.mark.parametrize("why", ["no key", "another process", "not asked at all", "asked"])
def test_a_window_in_which_an_attempt_came_to_no_probe_is_not_left_out(
    known: Database, stub: Stub, why: str
) -> None:
    settings = settings_of(sources=[{"url": stub.url, "server": "chat"}])
    loop = ProbeLoop(known, settings.probes, targets_of(settings), Metrics())
    begun_at = datetime.now(UTC)
    if why == "no key":
        stub.models_status = 401
    if why == "another process":
        with replaying(known, "chat"):
            loop.look()
    elif why != "not asked at all":
        loop.look()
    assert bool(stub.asked) == (why == "asked")
    assert loop.was_asking("chat", stub.url, begun_at, datetime.now(UTC)) == (why == "asked")


def test_a_window_in_which_a_probe_failed_is_left_out(known: Database, stub: Stub) -> None:
    """The server has counted its answer."""
    settings = settings_of(sources=[{"url": stub.url, "server": "chat"}])
    loop = ProbeLoop(known, settings.probes, targets_of(settings), Metrics())
    seen: list[bool] = []

    def body(_request: dict[str, Any]) -> object:
        now = datetime.now(UTC)
        seen.append(loop.was_asking("chat", stub.url, now, now))
        return answer(speculation=None)

    stub.body = body
    begun_at = datetime.now(UTC)
    loop.look()
    assert only(loop.states()).state == "refused"
    assert seen == [True]  # while it is asked
    assert loop.was_asking("chat", stub.url, begun_at, datetime.now(UTC))

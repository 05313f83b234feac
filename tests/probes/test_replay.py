"""Replays against the real engine as a process, and against servers that answer in other ways."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from sqlalchemy import select, text
from typer.testing import CliRunner, Result

from driftguard import cli
from driftguard.errors import BadInput, BadSettings, DriftGuardError
from driftguard.metrics import Metrics
from driftguard.probes import loop as loop_module
from driftguard.probes import prompt_set
from driftguard.probes.answers import ProbeFailed
from driftguard.probes.loop import ProbeLoop
from driftguard.probes.replay import Replay, replay
from driftguard.probes.target import ProbeTarget, target_of, targets_of
from driftguard.records.probe_session import PREFIX, parse
from driftguard.settings import ProbeSettings, ProbeTargetSettings, Settings
from driftguard.store.captures import CaptureFilter, read_captures
from driftguard.store.database import Database
from driftguard.store.probe_lock import replaying
from driftguard.store.tables import Record
from tests.alerting.http_receiver import wait_until
from tests.engine.server.processes import engine_process
from tests.pipeline.sidecar import running_sidecar
from tests.pipeline.traffic import Traffic, store
from tests.probes.servers import SPECULATION, Stub, answer, stub_server
from tests.proxy import engines
from tests.training.small_models import save_directory, small_model

RULES = ProbeSettings(pause_seconds=0.0, max_tokens=12)


def prompts_file(directory: Path, count: int = 9) -> Path:
    file = directory / "prompts.jsonl"
    lines = [{"prompt": f"t{n + 3} t4 t{n + 5}", "segment": "code"} for n in range(count)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def make_set(database: Database, file: Path, server: str = "chat") -> None:
    with database.session() as session:
        prompt_set.make(session, server, file=file, per_segment=1, is_replacing=False, now=datetime.now(UTC))


def records(database: Database) -> list[Record]:
    with database.session() as session:
        return list(session.scalars(select(Record).order_by(Record.seq)))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    save_directory(root / "target", small_model(1))
    save_directory(root / "poor", small_model(2))
    return root


@pytest.fixture
def stub() -> Iterator[Stub]:
    with stub_server() as serving:
        yield serving


@pytest.fixture
def known(database: Database, tmp_path: Path) -> Database:
    """A server that has traffic and canary prompts."""
    store(database, Traffic(seed=1).draw(3, {"code": 0.7}))
    make_set(database, prompts_file(tmp_path))
    return database


def probe(database: Database, url: str, *, ask_twice: bool = True) -> Replay:
    rules = RULES.model_copy(update={"ask_twice": ask_twice})
    done = replay(database, ProbeTargetSettings(server="chat", url=url), rules)
    assert done is not None
    return done


@pytest.mark.slow
def test_the_real_engine_is_probed_and_its_own_records_hold_no_probe(
    database: Database, models: Path, tmp_path: Path
) -> None:
    make_set(database, prompts_file(tmp_path))
    with running_sidecar(database, tmp_path / "data") as sidecar:
        options = ["--sidecar", str(sidecar.base_url), "--server-name", "chat", "--capture-fraction", "1"]
        with engine_process(models, *options) as (_, url, _ready):
            info = httpx.get(f"{url}/admin/info").json()
            first, second = probe(database, url), probe(database, f"{url}/v1")
            body = {"prompt": "t3 t4", "max_tokens": 3, "temperature": 0}
            httpx.post(f"{url}/v1/completions", json=body).raise_for_status()
            wait_until(
                lambda: any(one.kind == "request" for one in records(database)), "the engine's own record"
            )
    assert first == second  # greedy, seeded: a healthy server repeats itself
    assert (first.prompts, first.draft_version) == (9, info["draft"]["version"])
    assert first.drafted > 0
    found = records(database)
    probes = [one for one in found if one.kind == "probe"]
    assert len(probes) == 2 * 9 * 2  # each prompt is asked again at once, from the prefix cache
    assert len(found) == 37
    assert [one.session for one in probes[:18]] == [one.session for one in probes[18:]]
    asked = [parse(one.session or "") for one in probes[:18]]
    assert [one.is_warm for one in asked] == [False, True] * 9
    assert [one.prompt for one in asked[::2]] == [one.prompt for one in asked[1::2]]
    assert {one.segment for one in probes} == {"code"}
    one = probes[0]
    assert (one.temperature, one.acceptance_rule, one.num_speculative_tokens) == (0.0, "greedy", 4)
    assert one.verification == "greedy"
    assert sum(one.accepted_per_position or []) == one.accepted
    assert one.session is not None
    assert one.session.startswith(PREFIX)
    assert all(parse(one.session)[:2])
    with database.session() as session:
        assert read_captures(session, CaptureFilter(segments=["driftguard-probe"])) == []


def test_any_openai_compatible_server_with_the_numbers_will_do(known: Database, stub: Stub) -> None:
    done = probe(known, stub.url)
    assert (done.draft_version, done.acceptance) == ("v1", 0.35)  # the newest stream of that server
    path, body, headers = stub.asked[0]
    assert path == "/v1/completions"
    assert body == {"model": "big/model", "prompt": "t3 t4 t5", "temperature": 0, "seed": 0, "max_tokens": 12}
    assert headers["X-DriftGuard-Segment"] == "driftguard-probe"
    one = records(known)[-1]
    assert (one.steps, one.drafted, one.accepted, one.emitted) == (5, 20, 7, 12)
    assert one.accepted_per_position == [3, 2, 1, 1]
    assert one.time_per_output_token_seconds == pytest.approx(0.02)


@pytest.mark.parametrize(("owner", "named"), [("sglang", "auto"), ("a gateway", "sglang")])
def test_sglang_is_asked_for_the_numbers_and_tells_them(
    known: Database, stub: Stub, owner: str, named: str
) -> None:
    """Found by its list of models, or named where something between it and the probes signs that."""
    stub.owner, stub.body = owner, engines.sglang
    target = ProbeTargetSettings.model_validate({"server": "chat", "url": stub.url, "engine": named})
    assert replay(known, target, RULES) is not None
    assert all(body["return_spec_tokens_details"] is True for _, body, _ in stub.asked)
    one = records(known)[-1]
    assert (one.kind, one.steps, one.drafted, one.accepted, one.emitted) == ("probe", 43, 215, 63, 106)


def test_sglang_that_tells_nothing_although_asked_is_named(known: Database, stub: Stub) -> None:
    stub.owner, stub.body = "sglang", answer(None)
    with pytest.raises(ProbeFailed, match="counts that return_spec_tokens_details asks for"):
        probe(known, stub.url)


def test_a_server_in_trouble_is_not_taken_for_another_engine(known: Database, stub: Stub) -> None:
    stub.owner, stub.body, stub.models_status = "sglang", engines.sglang, 503
    target = ProbeTargetSettings(server="chat", url=stub.url, model="big/model")
    with pytest.raises(ProbeFailed, match="/v1/models with 503"):
        replay(known, target, RULES)
    assert stub.asked == []


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (200, answer(None), "--per-request-spec-decode-metrics summary"),
        (200, {"choices": [{"text": "x"}]}, "answers without metrics.speculative_decoding"),
        (200, b"<html>", "not the answer of an OpenAI-compatible server"),
        (200, {"choices": []}, "not the answer of an OpenAI-compatible server"),
        (200, answer({**SPECULATION, "num_accepted_draft_tokens": 99}), "contradict each other"),
        (400, {"error": {"message": "no such model"}}, "with 400: no such model"),
        (503, b"busy\ntry later", "with 503: busy try later"),
    ],
)
def test_what_cannot_be_used_is_one_line_and_stores_nothing(
    known: Database, stub: Stub, status: int, body: object, reason: str
) -> None:
    stub.status, stub.body = status, body
    with pytest.raises(ProbeFailed) as caught:
        probe(known, stub.url)
    assert reason in caught.value.detail
    assert stub.url in caught.value.detail
    assert "\n" not in caught.value.detail
    assert {one.kind for one in records(known)} == {"request"}
    assert len(stub.asked) == 1  # not a second time against a server in trouble


def test_no_server_and_no_stream_are_told_apart(database: Database, tmp_path: Path, stub: Stub) -> None:
    make_set(database, prompts_file(tmp_path))
    with pytest.raises(BadInput, match="no records of chat have arrived yet"):
        probe(database, stub.url)
    with pytest.raises(ProbeFailed, match="cannot be reached"):
        probe(database, "http://127.0.0.1:1")


def test_who_probes_without_the_settings_of_the_sidecar_is_told_to_name_them() -> None:
    with pytest.raises(BadSettings, match=r"source of these settings .* --config"):
        target_of(Settings(), "chat-eu-1", None)


def test_the_target_comes_from_the_command_line_then_probes_then_engines() -> None:
    settings = Settings.model_validate(
        {
            "probes": {"targets": [{"server": "a", "url": "http://a", "model": "m"}]},
            "engines": [{"server": "b", "admin_url": "http://b"}],
        }
    )
    assert target_of(settings, "a", None).url == "http://a"
    named = target_of(settings, "a", "http://other")
    assert (named.url, named.model) == ("http://other", "m")
    assert target_of(settings, "b", None).url == "http://b"
    assert target_of(settings, "c", "http://c").url == "http://c"
    with pytest.raises(BadSettings, match="none is for 'c'"):
        target_of(settings, "c", None)
    for server in ("a", "c"):
        with pytest.raises(BadSettings, match="--url: does not begin with http://"):
            target_of(settings, server, "localhost:8000")


def test_the_sidecar_replays_them_once_per_interval(
    known: Database, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(loop_module, "LOOK_AGAIN", timedelta(0))
    settings = Settings.model_validate(
        {
            "probes": {
                "targets": [
                    {"server": "away", "url": "http://127.0.0.1:1"},
                    {"server": "chat", "url": stub.url},
                ],
                "pause_seconds": 0,
            }
        }
    )
    loop = ProbeLoop(known, settings.probes, targets_of(settings), Metrics())
    looks: list[str] = []
    is_due = loop._is_due

    def counting(target: ProbeTarget, *rest: Any) -> bool:
        looks.append(target.server)
        return is_due(target, *rest)

    monkeypatch.setattr(loop, "_is_due", counting)
    loop.start()
    wait_until(lambda: looks.count("chat") >= 5, "five looks")
    loop.stop()
    assert len(stub.asked) == 18


def test_each_prompt_is_asked_once_where_that_is_enough(known: Database, stub: Stub) -> None:
    assert probe(known, stub.url, ask_twice=False).prompts == len(stub.asked) == 9
    assert not any(parse(one.session or "").is_warm for one in records(known) if one.kind == "probe")


def test_an_unforeseen_failure_is_counted(database: Database) -> None:
    metrics = Metrics()
    target = ProbeTarget(ProbeTargetSettings(server="chat", url="http://127.0.0.1:1"))
    loop = ProbeLoop(database, ProbeSettings(), [target], metrics)
    for failure in (ProbeFailed("chat: no answer"), RuntimeError("nobody foresaw it")):
        loop._attempt(target, Mock(side_effect=failure))
    assert metrics.registry.get_sample_value("driftguard_loop_failures_total", {"loop": "probes"}) == 1


def test_an_interval_without_a_server_is_a_setting_to_correct(database: Database) -> None:
    with pytest.raises(BadSettings, match=r"probes\.interval_seconds.*probes\.targets"):
        ProbeLoop(database, ProbeSettings(interval_seconds=60.0), [], Metrics())


@pytest.mark.slow
def test_the_commands_say_what_they_did_and_refuse_in_one_line(
    database_url: str, database: Database, tmp_path: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRIFTGUARD_DATABASE_URL", database_url)
    store(database, Traffic(seed=1).draw(3, {"code": 0.7}))

    def command(*arguments: str) -> Result:
        return CliRunner().invoke(cli.app, ["probe", *arguments, "--server", "chat"])

    made = command("init", "--file", str(prompts_file(tmp_path)))
    assert (made.exit_code, made.output) == (0, "9 canary prompts for chat: code 9\n")
    done = command("run", "--url", stub.url)
    assert (done.exit_code, done.output) == (0, "9 probes replayed on chat, draft v1: acceptance 0.350\n")
    for refused in (command("init"), command("run")):
        assert isinstance(refused.exception, DriftGuardError)  # main() prints it in one line
        assert "\n" not in refused.exception.detail


def test_a_replay_that_ended_stands_in_the_way_of_none(database: Database) -> None:
    """Not even for as long as the database takes to notice that a connection was closed."""
    held = text(
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted AND database = ("
        "SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    with database.session() as session:
        session.scalar(held)
        for _ in range(20):
            with replaying(database, "chat"):
                assert session.scalar(held) == 1
            assert session.scalar(held) == 0

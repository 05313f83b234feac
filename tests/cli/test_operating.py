"""What the API can, the commands can: against a running sidecar, over real HTTP."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import msgspec
import pytest
from typer.testing import CliRunner

from driftguard.app.doctor.finding import Finding
from driftguard.cli import app, main, sidecar_client
from driftguard.cli.doctor import print_finding
from driftguard.cli.incidents import print_incident
from driftguard.cli.output import table
from driftguard.cli.status_table import print_status, print_stream
from driftguard.demo.processes import free_url
from driftguard.errors import DriftGuardError
from driftguard.records.documents.retraining_run import RunNumbers, Verdict, Watch
from driftguard.store import retrain_runs
from driftguard.store.database import REQUEST, Database
from driftguard.store.keys import create_key
from driftguard.store.tables import RetrainRun
from tests.alerting.http_receiver import wait_until
from tests.alerting.incident_rows import add_incident
from tests.cli.operated_sidecar import RUN, operated_sidecar
from tests.pipeline.sidecar import post, running_sidecar
from tests.pipeline.traffic import Traffic
from tests.sources.served import served


@pytest.fixture(scope="module")
def sidecar(
    module_database_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[httpx.Client, UUID]]:
    database = Database.open(module_database_url)
    with operated_sidecar(database, tmp_path_factory.mktemp("data")) as running:
        yield running
    database.close()


def told(client: httpx.Client, *arguments: str) -> str:
    """Standard output of a command that knows the sidecar from the environment, where a proxy is set too."""
    variables = {"DRIFTGUARD_SIDECAR": str(client.base_url), "HTTP_PROXY": free_url(), "NO_PROXY": None}
    result = CliRunner().invoke(app, arguments, env=variables)
    assert result.exception is None, result.output
    return result.stdout


def refused(client: httpx.Client | str, *arguments: str) -> DriftGuardError:
    url = client if isinstance(client, str) else str(client.base_url)
    result = CliRunner().invoke(app, arguments, env={"DRIFTGUARD_SIDECAR": url})
    assert isinstance(result.exception, DriftGuardError), result.output
    return result.exception


LISTS = [
    (["streams", "list"], "/api/v1/streams?sort=verdict&limit=50"),
    (["streams", "show", "1"], "/api/v1/streams/1"),
    (["incidents", "list", "--state", "unresolved"], "/api/v1/incidents?state=unresolved&limit=50"),
    (["drafts", "list", "--server", "server-1"], "/api/v1/drafts?server=server-1&limit=50"),
    (["runs", "list"], "/api/v1/retrain-runs?limit=50"),
    (["runs", "show", str(RUN)], f"/api/v1/retrain-runs/{RUN}"),
]


@pytest.mark.parametrize(("command", "path"), LISTS, ids=lambda value: " ".join(value[:2]))
def test_the_json_of_a_command_is_that_of_the_api(
    sidecar: tuple[httpx.Client, UUID], command: list[str], path: str
) -> None:
    client, _ = sidecar
    before, printed, after = (
        client.get(path).json(),
        json.loads(told(client, *command, "--json")),
        client.get(path).json(),
    )
    assert printed in (before, after)


def test_a_piped_table_has_one_line_per_row_without_boxes_colours_or_wrapping(
    sidecar: tuple[httpx.Client, UUID],
) -> None:
    client, incident_id = sidecar
    head, *rows = told(client, "incidents", "list").splitlines()
    summary = client.get(f"/api/v1/incidents/{incident_id}").json()["summary"]
    assert len(summary) > 120
    assert head.split() == ["ID", "STATE", "SEVERITY", "OPENED", "SERVER", "SUMMARY"]
    (row,) = rows
    assert row.startswith(f"{incident_id}  ")
    assert row.endswith(summary)
    for command in (["settings"], ["status"], ["streams", "list"], ["runs", "list"], ["incidents", "--help"]):
        assert told(client, *command).isascii(), command


def test_a_run_is_shown_with_how_its_training_went(sidecar: tuple[httpx.Client, UUID]) -> None:
    shown = told(sidecar[0], "runs", "show", str(RUN))
    assert "Training: loss 2.000 at step 10, 1.500 at step 20" in shown
    assert (
        "Held out: loss 1.000 at step 0, 1.000 at step 20; single draft tokens kept 0.300, then 0.600"
        in shown
    )


@pytest.mark.parametrize(
    ("state", "verdict", "outcome", "shown"),
    [
        ("watching", "watching", "watching", "watching"),
        ("rolled_back", "watching", "undecided", "ended undecided"),
        ("watching", "worse", "worse", "worse"),
        ("rolled_back", "worse", "worse", "worse"),
        ("promoted", "stands", "stands", "stands"),
    ],
)
def test_api_command_and_page_say_alike_how_a_watch_ended(
    sidecar: tuple[httpx.Client, UUID],
    module_database_url: str,
    state: str,
    verdict: Verdict,
    outcome: str,
    shown: str,
) -> None:
    """One that a rollback by hand ended is not shown as going on."""
    watch = Watch((), (), 0.02, 24, 0, recovered=False, verdict=verdict)
    now = datetime.now(UTC)
    run = RetrainRun(
        id=uuid4(), server="server-2", target="target", trigger="manual", state=state, started_at=now,
        ended_at=None if state == "watching" else now, numbers=RunNumbers(watch=watch),
    )  # fmt: skip
    database = Database.open(module_database_url)
    with database.session() as session:
        retrain_runs.begin(session, run)
        run_id = run.id
    database.close()
    client = sidecar[0]
    assert client.get(f"/api/v1/retrain-runs/{run_id}").json()["watch_outcome"] == outcome
    listed = client.get("/api/v1/retrain-runs").json()["runs"]
    assert {run["id"]: run["watch_outcome"] for run in listed}[str(run_id)] == outcome
    assert f"Watch: {shown}, over 24 requests" in told(client, "runs", "show", str(run_id))
    assert f"Since the promotion: {shown}</h2>" in client.get(f"/retraining/{run_id}").text


def test_a_run_that_was_not_promoted_was_not_watched(sidecar: tuple[httpx.Client, UUID]) -> None:
    assert sidecar[0].get(f"/api/v1/retrain-runs/{RUN}").json()["watch_outcome"] is None


def test_names_are_shown_as_they_are(
    capsys: pytest.CaptureFixture[str], sidecar: tuple[httpx.Client, UUID]
) -> None:
    stream = sidecar[0].get("/api/v1/streams/1").json()
    print_stream({**stream, "method": "[/tree]", "server": "[chat]"})
    assert capsys.readouterr().out.startswith(f"[chat] {stream['target']}, [/tree] ")
    server, text = "[2001:db8:a:100::5]:8000", "Degraded: acceptance in support:key:de fell."
    segments = [{**stream["segments"][0], "segment": "support:key:de"}]
    print_stream({**stream, "server": server, "text": text, "segments": segments})
    shown = capsys.readouterr().out
    assert shown.startswith(f"{server} ")
    assert f"  {text}\n" in shown
    assert "  support:key:de: " in shown


STEERS = "\x1b[31m\x9b2J\x07\nchat\u202e"
SEEN = r"\x1b[31m\x9b2J\x07\nchat\u202e"


def test_no_name_that_others_chose_steers_the_terminal(
    database: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_sidecar(database, tmp_path) as client:
        record = Traffic(seed=92).draw(1, {STEERS: 0.7})[0]
        post(client, [msgspec.structs.replace(record, server=STEERS, target=STEERS)])
        stream = wait_for_stream(client)
        incident_id = add_incident(database, [], stream_id=stream)
        wait_until(
            lambda: client.get(f"/api/v1/incidents/{incident_id}").json()["diagnosis"], "the diagnosis"
        )
        for command in (
            ["status"], ["streams", "list"], ["streams", "show", str(stream)], ["incidents", "list"],
            ["incidents", "show", str(incident_id)],
        ):  # fmt: skip
            shown = told(client, *command)
            assert SEEN in shown, command
            assert shown.replace("\n", "").isprintable(), command
    monkeypatch.setattr(sys, "argv", ["driftguard", "status", "--sidecar", STEERS])
    with pytest.raises(SystemExit):
        main()
    shown = capsys.readouterr().err
    assert SEEN.partition("\\n")[0] in shown
    assert shown.replace("\n", "").isprintable()


def wait_for_stream(client: httpx.Client) -> int:
    def streams() -> list[dict[str, Any]]:
        return list(client.get("/api/v1/streams").json()["streams"])

    wait_until(lambda: bool(streams()), "the stream")
    return int(streams()[0]["id"])


def test_what_the_doctor_finds_does_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_finding(Finding("sources", "failed", f"{STEERS} does not answer", f"start {STEERS}"))
    shown = capsys.readouterr().out
    assert shown.count(SEEN) == 2
    assert shown.replace("\n", "").isprintable()


def test_status_is_not_wrapped_where_it_is_piped(sidecar: tuple[httpx.Client, UUID]) -> None:
    client, _ = sidecar
    lines = told(client, "status").splitlines()
    sentence = client.get("/api/v1/status").json()["streams"][0]["text"]
    assert f"  {sentence}" in lines


ROWS = [["0192f0c1", "open", "Acceptance of the draft fell, and nobody knows why it did"]]


def test_on_a_terminal_a_table_keeps_within_its_width() -> None:
    wrapped = list(table(("ID", "STATE", "SUMMARY"), ROWS, 46))
    assert wrapped == [
        "ID        STATE  SUMMARY",
        "0192f0c1  open   Acceptance of the draft fell,",
        "                 and nobody knows why it did",
    ]
    blocks = list(table(("ID", "STATE", "SUMMARY"), ROWS, 36))
    assert blocks == [
        "ID       0192f0c1",
        "STATE    open",
        "SUMMARY  Acceptance of the draft",
        "         fell, and nobody knows why",
        "         it did",
    ]


def test_an_incident_with_its_story_and_the_decisions_of_a_person(database: Database, tmp_path: Path) -> None:
    with operated_sidecar(database, tmp_path) as (client, incident_id):
        one = str(incident_id)
        shown = told(client, "incidents", "show", one)
        acknowledged = told(client, "incidents", "acknowledge", one, "--reason", "on it")
        resolved = json.loads(told(client, "incidents", "resolve", one, "--reason", "fixed", "--json"))
        again = refused(client, "incidents", "acknowledge", one, "--reason", "late")
    assert f"/incidents/{one}" in shown
    assert "open: acceptance fell from 0.74 to 0.58" in shown
    assert "german 0.74 to 0.58" in shown
    assert acknowledged == f"{one} is acknowledged\n"
    assert [step["reason"] for step in resolved["transitions"]][1:] == ["on it", "fixed"]
    assert str(again).startswith(
        "Illegal transition: an incident that is resolved cannot become acknowledged"
    )
    assert again.exit_code == 1


def test_the_next_page_is_named_beside_the_table(sidecar: tuple[httpx.Client, UUID]) -> None:
    environment = {"DRIFTGUARD_SIDECAR": str(sidecar[0].base_url)}
    first = CliRunner().invoke(app, ["drafts", "list", "--limit", "1"], env=environment)
    assert len(first.stdout.splitlines()) == 2
    option, cursor = first.stderr.removeprefix("there is more: ").split()
    second = CliRunner().invoke(app, ["drafts", "list", "--limit", "1", option, cursor], env=environment)
    assert second.stderr == ""
    assert {first.stdout.splitlines()[1][:2], second.stdout.splitlines()[1][:2]} == {"v1", "v2"}


WRONG: list[tuple[list[str], int, str]] = [
    (["incidents", "show", str(UUID(int=7))], 1, f"Not found: there is no incident {UUID(int=7)}"),
    (["streams", "show", "99"], 1, "Not found: there is no stream 99"),
    (["runs", "list", "--state", "gone"], 2, "Bad input: state: Input should be 'collecting'"),
    (
        ["incidents", "list", "--since", "yesterday"],
        2,
        "--since: 'yesterday' should be a date and time with UTC offset, such as 2026-11-01T00:00:00Z, or",
    ),
    (
        ["incidents", "list", "--since", "2026-11-01"],
        2,
        "Bad input: since: should be a date and time with UTC offset, as in 2026-11-01T00:00:00Z",
    ),
    (["incidents", "list", "--since", "2026-11-32"], 2, "Bad input: since: Input should be a valid datetime"),
    (["incidents", "list", "--cursor", "x"], 2, "Bad input: cursor: not a cursor of this list"),
    (["drafts", "announce", "chat", "v2"], 1, "Not found: there is no scraped server chat"),
    (["drafts", "rollback", "server-1", "--reason", "x"], 2, "no known draft is in service on server-1"),
    (["runs", "start"], 2, "--yes: needed where nobody can be asked"),
    (["runs", "start", "--yes"], 2, "Bad input: engines: none is set"),
    (["records", "export", "--output", "/nowhere/x"], 2, "--output: /nowhere/x cannot be written"),
]


@pytest.mark.parametrize(("command", "code", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_refused_is_told_in_one_sentence(
    sidecar: tuple[httpx.Client, UUID], command: list[str], code: int, message: str
) -> None:
    error = refused(sidecar[0], *command)
    assert str(error).startswith(message)
    assert "\n" not in str(error)
    assert error.exit_code == code


@pytest.mark.parametrize(
    ("awaited", "words"),
    [
        (True, "is rolled back as soon as records of draft v1 arrive"),
        (False, "is rolled back; draft v1 serves instead"),
    ],
)
def test_a_rollback_by_a_restart_is_not_told_as_done_before_records_say_so(
    monkeypatch: pytest.MonkeyPatch, awaited: bool, words: str
) -> None:
    answer = sidecar_client.Answer(
        "", {"server": "chat", "draft_version": "v1", "awaited": awaited}, "http://sidecar"
    )
    monkeypatch.setattr(sidecar_client, "call", lambda *_, **__: answer)
    command = ["drafts", "rollback", "chat", "--draft-version", "v2", "--reason", "x", "--yes"]
    assert f"chat: draft v2 {words}" in CliRunner().invoke(app, command).stdout


def test_an_incident_is_shown_with_the_levels_that_its_summary_tells(
    sidecar: tuple[httpx.Client, UUID], capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain counts may have risen where acceptance fell, as answers are shorter."""
    client, incident_id = sidecar
    incident = client.get(f"/api/v1/incidents/{incident_id}").json()
    (segment,) = incident["segments"]
    segment["before"]["rate"], segment["after"]["rate"] = 0.61, 0.62
    segment["adjusted"] = {"before": 0.614, "after": 0.611, "counted_before": 0.61, "counted_after": 0.62}
    print_incident(incident, "http://sidecar")
    told_of = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if "  " in line)
    assert told_of["segments"] == "german 0.614 to 0.611"
    assert told_of["slower"] == "by  23%"
    incident["cost_percent"] = -12.4
    print_incident(incident, "http://sidecar")
    assert "faster by  12%" in capsys.readouterr().out


def test_an_id_that_is_none_is_wrong_usage(sidecar: tuple[httpx.Client, UUID]) -> None:
    result = CliRunner().invoke(app, ["incidents", "show", "12"])
    assert result.exit_code == 2
    assert "Invalid value for 'ID'" in result.stderr


def test_a_sidecar_that_is_not_there_is_named_without_its_password() -> None:
    url = free_url()
    error = refused(url.replace("//", "//me:hunter2@"), "incidents", "list")
    assert str(error).startswith(f"no answer from {url}: ")
    assert "--sidecar or DRIFTGUARD_SIDECAR" in str(error)
    assert str(refused("127.0.0.1:8200", "status")) == (
        "--sidecar: 127.0.0.1:8200 does not begin with http:// or https://"
    )
    assert (
        str(refused("http://me:hun/ter2@chat:8200", "status"))
        == "--sidecar: http://chat:8200 is not an address"
    )
    assert (
        str(refused("http://me:hunter2@chat..internal:8200", "status"))
        == "--sidecar: http://chat..internal:8200 is not an address"
    )
    assert "hunter2" not in str(refused("me:hunter2@chat:8200", "status"))
    with served() as other:
        assert "is no sidecar: its answer (404) is not JSON" in str(refused(other.url, "drafts", "list"))
        other.pages["/api/v1/status?limit=50"] = lambda: (200, "[" * 100_000)
        assert "is no sidecar: its answer (200) is not JSON" in str(refused(other.url, "status"))


def test_a_command_waits_longer_than_the_sidecar_for_its_database() -> None:
    """It said that no sidecar answers, of one that was about to answer, or to say what is wrong."""
    assert REQUEST.silence_seconds < sidecar_client.ANSWER_SECONDS


def test_neither_password_nor_key_is_shown(
    sidecar: tuple[httpx.Client, UUID], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, incident_id = sidecar
    url = str(client.base_url).replace("//", "//me:hunter2@")
    result = CliRunner().invoke(app, ["incidents", "show", str(incident_id), "--sidecar", url])
    assert str(client.base_url).rstrip("/") in result.stdout
    assert "hunter2" not in result.output
    for key in ("dg_sec\nret", "dg_s\xe9cret"):
        monkeypatch.setenv("DRIFTGUARD_API_KEY", key)
        error = refused(client, "incidents", "list")
        assert str(error).startswith("DRIFTGUARD_API_KEY: holds ")
        assert error.exit_code == 2
        assert "cret" not in str(error)


def test_a_missing_key_is_named_with_what_makes_one(database: Database, tmp_path: Path) -> None:
    with database.session() as session:
        key = create_key(session, "operator")
    with running_sidecar(database, tmp_path, host="0.0.0.0") as client:
        missing = refused(client, "captures", "export")
        environment = {"DRIFTGUARD_SIDECAR": str(client.base_url), "DRIFTGUARD_API_KEY": "dg_wrong"}
        wrong = CliRunner().invoke(app, ["captures", "export"], env=environment)
        right = CliRunner().invoke(
            app, ["captures", "export"], env={**environment, "DRIFTGUARD_API_KEY": f" {key}\n"}
        )
    assert "this call needs an API key" in str(missing)
    assert "set DRIFTGUARD_API_KEY" in str(missing)
    assert "unknown or revoked" in str(wrong.exception)
    assert (right.exit_code, right.stdout) == (0, "")


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("records export >/dev/full", 1, "driftguard: No space left on device\n"),
        ("status >&-", 0, ""),
        ("settings", 0, ""),
        ("replay - <&-", 0, ""),
        (
            "runs start <&-",
            2,
            "driftguard: --yes: needed where nobody can be asked, as this changes what is served\n",
        ),
    ],
    ids=["no space", "closed", "ASCII alone", "no input", "nobody to ask"],
)
def test_an_output_that_does_not_take_it_all_or_a_closed_input_is_no_traceback(
    sidecar: tuple[httpx.Client, UUID], command: str, code: int, said: str
) -> None:
    client, _ = sidecar
    environment = {
        **os.environ,
        "DRIFTGUARD_SIDECAR": str(client.base_url),
        "DRIFTGUARD_PROXY__SERVER": "東京",
        "PYTHONIOENCODING": "ascii",
    }
    line = f"{sys.executable} -m driftguard {command}"
    result = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, env=environment, check=False, timeout=60
    )
    assert (result.returncode, result.stderr) == (code, said)


def test_json_is_json_on_an_output_that_takes_ascii_alone() -> None:
    name = "café 東京 \N{ROCKET}"
    environment = {**os.environ, "DRIFTGUARD_PROXY__SERVER": name, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "driftguard", "settings", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=60)
    assert result.stdout.isascii()
    assert json.loads(result.stdout)["proxy"]["server"] == name


@pytest.mark.parametrize("command", ["status", "incidents list"])
def test_another_server_that_answers_json_is_no_sidecar(command: str) -> None:
    paths = ("/api/v1/status?limit=50", "/api/v1/incidents?limit=50")
    with served(dict.fromkeys(paths, lambda: (200, '{"hello": 1}'))) as other:
        assert "is no sidecar: its answer has no " in str(refused(other.url, *command.split()))
    with served(dict.fromkeys(paths, lambda: (404, '{"detail": "Not Found"}'))) as vllm:
        told = f"{vllm.url} is no sidecar: it has no /api/v1/"
        assert str(refused(vllm.url, *command.split())).startswith(told)


def test_without_a_record_the_status_says_what_a_scraped_server_waits_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And not that it should be scraped."""
    source = {"server": "chat-eu-1", "condition": "idle", "detail": ""}
    status = {"sources": [source], "sources_elsewhere": [], "probes": [], "streams": []}
    with served({"/api/v1/status?limit=50": lambda: (200, json.dumps(status))}) as fake:
        print_status(fake.url, as_json=False, limit=50)
        status["sources"] = []
        print_status(fake.url, as_json=False, limit=50)
    waiting, told, unconnected = capsys.readouterr().out.splitlines()
    assert waiting == "source chat-eu-1: idle"
    assert told.startswith("No records yet: the first window of a scraped server comes")
    assert unconnected.startswith("No records yet: scrape a server")


def test_an_export_is_written_to_a_file_and_survives_a_reader_that_has_enough(
    sidecar: tuple[httpx.Client, UUID], tmp_path: Path
) -> None:
    client, _ = sidecar
    file = tmp_path / "records.jsonl"
    told(client, "records", "export", "--output", str(file), "--segment", "[chat]", "--since", "30d")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows
    assert {row["segment"] for row in rows} == {"[chat]"}
    refused(client, "records", "export", "--output", str(file), "--since", "never")
    assert len(file.read_text().splitlines()) == len(rows), "a refusal has emptied it"
    command = (
        f"{sys.executable} -m driftguard records export --sidecar {client.base_url} | true; echo $PIPESTATUS"
    )
    piped = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60)
    assert piped.stderr == ""


@pytest.mark.parametrize(("typed", "code"), [("n\n", 1), ("y\n", 2)])
def test_what_changes_the_service_is_asked_for_on_a_terminal(
    sidecar: tuple[httpx.Client, UUID], typed: str, code: int
) -> None:
    client, _ = sidecar
    command = [sys.executable, "-m", "driftguard", "runs", "start", "--sidecar", str(client.base_url)]
    ours, theirs = pty.openpty()
    os.write(ours, typed.encode())
    result = subprocess.run(
        command,
        stdin=theirs,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(ours)
    os.close(theirs)
    assert "put it into service if it is better? [y/N]" in result.stderr
    assert ("nothing was changed" if code == 1 else "engines: none is set") in result.stderr
    assert result.returncode == code


COMPLETIONS = {
    "bash": {"COMP_WORDS": "driftguard incidents ac", "COMP_CWORD": "2"},
    "zsh": {"_TYPER_COMPLETE_ARGS": "driftguard incidents ac"},
    "fish": {"_TYPER_COMPLETE_ARGS": "driftguard incidents ac", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
}


@pytest.mark.parametrize("shell", COMPLETIONS)
def test_shells_complete_commands(shell: str) -> None:
    environment = {"_DRIFTGUARD_COMPLETE": f"complete_{shell}", **COMPLETIONS[shell]}
    result = CliRunner().invoke(app, [], prog_name="driftguard", env=environment)
    assert "acknowledge" in result.stdout
    assert "accept" in result.stdout
    assert "usual" not in result.stdout


def test_every_help_text_keeps_its_brackets_and_every_command_its_line() -> None:
    assert "[KIND=]URL" in CliRunner().invoke(app, ["serve", "--help"]).stdout
    for group in ([], ["incidents"], ["streams"], ["drafts"], ["runs"], ["records"], ["probe"], ["keys"]):
        listed = CliRunner().invoke(app, [*group, "--help"], env={"COLUMNS": "80"}).stdout
        assert "..." not in listed.partition("Commands:")[2]

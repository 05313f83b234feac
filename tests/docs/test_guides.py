"""Every guide and every page of the root agree with the code: commands, settings, addresses, files, links,
metrics."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import pytest
import typer
from driftguard_engine.__main__ import app as engine_app
from driftguard_training.__main__ import main
from markdown_it import MarkdownIt
from pydantic import BaseModel

from docs.site_markdown import slug
from driftguard.api.application import http_application
from driftguard.cli import app
from driftguard.metrics.labels import CHORES, LOOPS
from driftguard.retraining.ledger.outcome import EXIT_CODES
from driftguard.settings import PREFIX, Settings
from driftguard.settings.loading import RESERVED_VARIABLES, describe_settings, load_settings
from tests.alerts.committed import ALERTS, alerts
from tests.deploy.committed import ROOT, commands_of_shell, parse_command, set_environment
from tests.deploy.test_compose import EXAMPLE

GUIDES: Final = sorted((ROOT / "docs").glob("*.md"))
PAGES: Final = [*sorted(ROOT.glob("*.md")), *GUIDES]
TEXT: Final = {page: page.read_text(encoding="utf-8") for page in PAGES}
PUBLISHED: Final = [
    *PAGES,
    *sorted(ROOT.glob("alerts/runbooks/*.md")),
    *sorted(ROOT.glob("tests/benchmarks/results/*.md")),
]
CRON_JOB: Final = r"^(?:[\d*]+ +){5}\w+ +(.*)$"
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def blocks(page: Path, language: str) -> list[str]:
    """With the indentation of a list taken off."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", TEXT[page], re.MULTILINE | re.DOTALL)
    return [re.sub(rf"^{indent}", "", text, flags=re.MULTILINE) for indent, text in found]


def spans(page: Path) -> list[str]:
    """Inline code."""
    prose = re.sub(r"^ *```.*?^ *```", "", TEXT[page], flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", prose)


@every_page
def test_commands_in_blocks_are_taken(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks(page, "sh"):
        without_input = re.sub(r"<<(\w+)\n.*?^\1$", "", block, flags=re.DOTALL | re.MULTILINE)
        without_input = re.sub(r'"\$(?:INCIDENT|RUN)"', str(UUID(int=0)), without_input)
        for arguments in commands_of_shell(without_input):
            parse_command(arguments)
    for block in blocks(page, "crontab"):
        (command,) = re.findall(CRON_JOB, block, re.MULTILINE)
        (arguments,) = commands_of_shell(command)
        parse_command(arguments)


@every_page
def test_commands_in_prose_have_these_options(page: Path) -> None:
    for span in spans(page):
        if not span.startswith("driftguard "):
            continue
        command: Any = typer.main.get_command(app)
        words = shlex.split(span)[1:]
        if words[0] == "engine":
            command, words = typer.main.get_command(engine_app), words[1:]
        while words and not words[0].startswith("--") and hasattr(command, "get_command"):
            found = command.get_command(typer.Context(command), words[0])
            assert found is not None, span
            command, words = found, words[1:]
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        assert {word for word in words if word.startswith("--")} <= known, span


@every_page
def test_the_training_takes_its_options(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--help ends it before anything is done, but after the options before it were read."""
    for line in re.findall(r"^python -m driftguard_training (.*)$", TEXT[page], re.MULTILINE):
        with pytest.raises(SystemExit) as ended:
            main([*shlex.split(line), "--help"])
        assert ended.value.code == 0
        with pytest.raises(SystemExit) as ended:
            main([*shlex.split(line), "--no-such-option"])
        assert capsys.readouterr().err.strip().endswith("unrecognized arguments: --no-such-option")


@every_page
def test_settings_in_blocks_are_taken(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, {})
    for number, block in enumerate(blocks(page, "toml")):
        file = tmp_path / f"{number}.toml"
        file.write_text(block, encoding="utf-8")
        load_settings(file)


def setting_names() -> set[str]:
    names = {name for name, _, _ in describe_settings()} | set(Settings.model_fields)
    lists = {name: field.annotation for name, field in Settings.model_fields.items()}
    for name, annotation in lists.items():
        for inner in getattr(annotation, "__args__", ()):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                names |= {f"{name}.{field}" for field in inner.model_fields}
    return names


@every_page
def test_settings_in_prose_exist(page: Path) -> None:
    groups = "|".join({name.partition(".")[0] for name in setting_names() if "." in name})
    named = {
        span.partition(" ")[0] for span in spans(page) if re.match(rf"(?:{groups})\.[a-z_]+\b(?!/)", span)
    }
    assert named <= setting_names()


@every_page
def test_variables_exist(page: Path) -> None:
    of_settings = {PREFIX + name.upper().replace(".", "__") for name in setting_names()}
    named = set(re.findall(rf"\b{PREFIX}[A-Z_]+\b", TEXT[page]))
    assert named <= of_settings | RESERVED_VARIABLES | EXAMPLE.keys()


def paths_named(page: Path) -> Iterator[str]:
    urls = re.findall(r"http://(?:127\.0\.0\.1|driftguard):8200(/[^\s'\"`,?)>]*)", TEXT[page])
    yield from (url for url in urls if url != "/")
    for span in spans(page):
        for word in span.split():
            if re.match(r"/(api/v1|healthz|readyz|metrics|runbooks)(/|$|\?)", word):
                yield word.partition("?")[0]


@pytest.fixture(scope="module")
def known_addresses() -> list[re.Pattern[str]]:
    known = {*http_application().openapi()["paths"], "/api/v1/openapi.json", "/runbooks/NAME"}
    return [re.compile(re.sub(r"\{\w+\}", "[^/]+", path)) for path in known]


@every_page
def test_addresses_of_the_sidecar_exist(page: Path, known_addresses: list[re.Pattern[str]]) -> None:
    for path in paths_named(page):
        assert any(pattern.fullmatch(path) for pattern in known_addresses), path


@pytest.mark.parametrize("page", PUBLISHED, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith(("http", "$SIDECAR")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {slug(heading) for heading in headings}, link


@every_page
def test_files_exist(page: Path) -> None:
    named = re.findall(r"\b(?:alerts|dashboards|deploy|docs|tests)/[\w./*-]*\w", TEXT[page])
    inside = {"alerts", "dashboards", "deploy", "docs", "tests"} & {path.name for path in ROOT.iterdir()}
    for path in named:
        if path.partition("/")[0] in inside and not re.search(rf"[\w/]{re.escape(path)}", TEXT[page]):
            assert list(ROOT.glob(path)), path


@every_page
def test_metrics_exist(page: Path) -> None:
    known = set(re.findall(r"^\| `(\w+)`", TEXT[ROOT / "docs" / "metrics.md"], re.MULTILINE))
    named = {span for span in spans(page) if re.fullmatch(r"driftguard_\w+", span)} - {"driftguard_training"}
    assert named <= known


def test_the_index_lists_every_document_once() -> None:
    """It is the navigation of the site too."""
    index = ROOT / "docs" / "README.md"
    listed = re.findall(r"^\| \[[^\]]+\]\(([\w./-]+\.md)\)", TEXT[index], re.MULTILINE)
    runbooks = (ROOT / "alerts" / "runbooks").glob("*.md")
    documents = {*PAGES, *runbooks} - {index, ROOT / "README.md"}
    assert sorted((index.parent / name).resolve() for name in listed) == sorted(documents)


@pytest.mark.parametrize("page", PUBLISHED, ids=lambda page: page.stem)
def test_what_is_meant_as_a_table_is_one(page: Path) -> None:
    """A line below the head with another number of columns makes a paragraph of it."""
    text = page.read_text(encoding="utf-8")
    tables = [
        token.map
        for token in MarkdownIt("commonmark").enable("table").parse(text)
        if token.type == "table_open"
    ]
    assert [
        number
        for number, line in enumerate(text.splitlines())
        if re.fullmatch(r"\s*\|(?: ?:?-+:? ?\|)+", line)
    ] == [lines[0] + 1 for lines in tables if lines]


def test_every_alert_is_in_the_guide() -> None:
    text = TEXT[ROOT / "docs" / "alerting.md"]
    named = set(re.findall(r"`(DriftGuard\w+)`", text))
    assert named == {alert["alert"] for alert in alerts()} | {"DriftGuardIncident"}
    assert named == {file.stem for file in (ALERTS / "runbooks").iterdir()}


def test_every_chore_and_loop_is_in_the_runbook_and_in_its_alert() -> None:
    runbook = (ALERTS / "runbooks" / "DriftGuardSidecarUnhealthy.md").read_text(encoding="utf-8")
    for problem, names in (("failing_chore", CHORES), ("failing_loop", LOOPS)):
        (alert,) = (alert for alert in alerts() if alert["labels"].get("problem") == problem)
        told = re.findall(r"(\w+):", alert["annotations"]["description"])
        assert sorted(told) == sorted(names)
        assert [name for name in names if f"`{name}`" not in runbook] == []


def test_every_exit_code_of_a_retraining_is_in_the_guide() -> None:
    table = TEXT[ROOT / "docs" / "nightly-retraining.md"].partition("| exit code | |")[2].partition("\n\n")[0]
    told = set(re.findall(r"^\| (\d) \|", table, re.MULTILINE))
    assert told == {str(code) for code in EXIT_CODES.values()} | {"2"}


def test_the_cron_job_reaches_the_database_and_tells_the_exit_code(tmp_path: Path) -> None:
    """As cron runs it, with files of the test in the place of those that it names."""
    (block,) = blocks(ROOT / "docs" / "nightly-retraining.md", "crontab")
    (command,) = re.findall(CRON_JOB, block, re.MULTILINE)
    assert "%" not in command  # cron makes a line break of it
    variables = dict(re.findall(r"^(\w+)=(.*)$", block, re.MULTILINE))
    url, log = "postgresql://driftguard@db.internal/driftguard?sslmode=require&connect_timeout=5", "log"
    for name, text in {
        "driftguard.env": f"DRIFTGUARD_DATABASE_URL='{url}'\n",
        "driftguard": "#!/bin/sh\nenv; echo these: $*; exit 3\n",
        "logger": f"#!/bin/sh\nexec cat > {tmp_path / log}\n",
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    for name in ("/etc/driftguard/driftguard.env", "/opt/driftguard/bin/driftguard"):
        assert name in command
        command = command.replace(name, str(tmp_path / Path(name).name))
    environment = {**variables, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(["/bin/sh", "-c", command], env=environment, check=True, timeout=60)
    told = (tmp_path / log).read_text(encoding="utf-8").splitlines()
    assert {"DRIFTGUARD_CONFIG", "DRIFTGUARD_DATA_DIR"} == variables.keys()
    assert {f"{name}={value}" for name, value in variables.items()} <= set(told)
    assert f"DRIFTGUARD_DATABASE_URL={url}" in told
    assert told[-2:] == ["these: retrain", "exit code 3"]


def test_what_the_guides_say_of_defaults_is_so() -> None:
    """`setting` (default)"""
    defaults = {name: default for name, default, _ in describe_settings()}
    seen = 0
    for text in TEXT.values():
        for name, told in re.findall(r"`(\w+\.\w+)` \(([\d.,]+)%?\)", text):
            value = float(told.replace(",", ""))
            assert defaults[name] in (value, value / 100), (name, told)
            seen += 1
    assert seen > 8

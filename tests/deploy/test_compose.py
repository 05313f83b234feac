"""docker-compose.yml: its files, ports, commands and settings are there, and nothing is open to others."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from string import Template
from typing import Any

import pytest
import yaml
from driftguard_engine.server.app import CANCEL_AFTER_SECONDS, ServeOptions
from driftguard_engine.telemetry.telemetry import JOIN_GRACE_SECONDS
from typer.testing import CliRunner

from driftguard.alerting.rules.generate import rules_file
from driftguard.alerting.rules.parameters import RuleParameters
from driftguard.cli.main import app
from driftguard.settings.loading import load_settings
from tests.alerts.committed import ALERTMANAGER, alerts, load
from tests.dashboards.committed import DASHBOARDS
from tests.deploy.committed import (
    DEPLOY,
    ROOT,
    VERSION,
    commands_of_shell,
    documents,
    parse_command,
    set_environment,
)
from tests.deploy.test_dockerfile import last

SECRETS = ("POSTGRES_PASSWORD", "DRIFTGUARD_API_KEY", "GRAFANA_ADMIN_PASSWORD")
EXAMPLE = dict(  # with the lines of the built-in engine
    re.findall(r"^#?(\w+)=(.*)$", (ROOT / ".env.example").read_text(encoding="utf-8"), re.MULTILINE)
)
TEXT = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
KEY = "k" * 64
RULES_FILE = "/var/lib/driftguard-rules/driftguard-rules.yaml"


def interpolate(text: str) -> str:
    """As compose does it, with the variables of .env.example and a value for each secret."""
    known = {**EXAMPLE, **dict.fromkeys(SECRETS, KEY)}
    for _ in range(2):  # ENGINES names another variable
        text = re.sub(r"\$\{(\w+)(?::[-?][^}]*)?\}", lambda found: known[found[1]], text)
    return text


COMPOSE: dict[str, Any] = yaml.safe_load(interpolate(TEXT))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
EXITS_WITHIN_SECONDS = 15  # the sidecar
OURS = ("setup", "driftguard", "engine", "retrain")


def commands(service: dict[str, Any], stage: str) -> list[list[str]]:
    if service.get("entrypoint") == ["sh", "-c"]:
        return commands_of_shell(service["command"][0])
    return [service.get("command") or yaml.safe_load(last(stage, "CMD"))]


def test_every_secret_is_asked_for_and_none_is_committed() -> None:
    named = set(re.findall(r"\$\{(\w+)", TEXT))
    assert named | {"COMPOSE_PROFILES"} == EXAMPLE.keys()
    assert all(EXAMPLE[name] == "" and f"${{{name}:?" in TEXT for name in SECRETS)
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert ".env" in ignored


def test_nobody_but_this_machine_reaches_a_port_and_nobody_at_all_the_database() -> None:
    published = {name: port for name, service in SERVICES.items() for port in service.get("ports", [])}
    assert all(re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port) for port in published.values())
    assert published.keys() == {"driftguard", "engine", "prometheus", "alertmanager", "grafana"}


@pytest.mark.parametrize("name", SERVICES)
def test_what_a_service_mounts_and_waits_for_is_there(name: str) -> None:
    service = SERVICES[name]
    for volume in service.get("volumes", []):
        source, target = volume.split(":")[:2]
        assert (ROOT / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], volume
        assert Path(target).is_absolute()
    for needed, how in service.get("depends_on", {}).items():
        if how["condition"] == "service_healthy":
            assert "healthcheck" in SERVICES[needed] or "target" in SERVICES[needed]["build"]
        else:
            assert (how["condition"], SERVICES[needed]["restart"]) == ("service_completed_successfully", "no")


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("driftguard", EXITS_WITHIN_SECONDS),
        ("engine", ServeOptions().shutdown_limit_seconds + CANCEL_AFTER_SECONDS + 2 * JOIN_GRACE_SECONDS),
        ("postgres", 30),  # it writes out what is in memory, or has to recover at its next start
    ],
)
def test_a_service_that_is_stopped_has_the_time_that_it_needs(name: str, seconds: float) -> None:
    """Docker kills it after ten seconds unless told otherwise: answers of the engine end in the middle."""
    assert float(SERVICES[name].get("stop_grace_period", "10s").removesuffix("s")) > seconds


@pytest.mark.parametrize("name", [name for name in SERVICES if name not in OURS])
def test_a_foreign_image_is_pinned_and_its_health_is_known(name: str) -> None:
    _, _, tag = SERVICES[name]["image"].partition(":")
    assert re.match(r"v?\d", tag)
    assert SERVICES[name]["healthcheck"]["test"][0] == "CMD"
    assert SERVICES[name]["restart"] == "unless-stopped"


@pytest.mark.parametrize("name", OURS)
def test_our_services_are_locked_down_and_run_our_commands(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = SERVICES[name]
    stage = service["build"]["target"]
    assert service["image"] == f"driftguard-{stage}:{VERSION}"
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    found = commands(service, stage)
    assert found
    for command in found:
        parse_command(command)
    if name != "engine":
        set_environment(monkeypatch, service["environment"])
        monkeypatch.delenv("DRIFTGUARD_CONFIG")
        (mounted,) = [volume for volume in service["volumes"] if "driftguard.toml" in volume]
        host, inside, mode = mounted.split(":")
        assert (inside, mode) == (service["environment"]["DRIFTGUARD_CONFIG"], "ro")
        settings = load_settings(ROOT / host)
        (engine,) = settings.engines
        assert engine.admin_url == "http://engine:8100"
        assert engine.api_key is not None
        assert engine.api_key.get_secret_value() == KEY
        assert f"--server-name={engine.server}" in SERVICES["engine"]["command"]
        # what is promoted was written by one image and is read by the other
        assert not settings.retraining.automatic


def test_without_its_lines_in_the_environment_there_is_no_built_in_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (default,) = re.findall(r"DRIFTGUARD_ENGINES: '\$\{ENGINES:-(.*)\}'", TEXT)
    monkeypatch.setenv("DRIFTGUARD_ENGINES", default)
    assert load_settings().engines == []
    assert SERVICES["engine"]["profiles"] == [EXAMPLE["COMPOSE_PROFILES"]]


def test_the_engine_reads_candidates_where_the_retraining_writes_them() -> None:
    assert "data:/var/lib/driftguard" in SERVICES["engine"]["volumes"]
    assert "data:/var/lib/driftguard" in SERVICES["retrain"]["volumes"]
    assert "DRIFTGUARD_DATA_DIR=/var/lib/driftguard" in last("engine", "ENV")


def test_prometheus_scrapes_the_sidecar_as_the_rules_want_it_and_loads_them() -> None:
    (config,) = documents(DEPLOY / "compose" / "prometheus.yml")
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    assert jobs["driftguard"]["static_configs"] == [{"targets": ["driftguard:8200"]}]
    (engine,) = jobs["driftguard-engine"]["dns_sd_configs"]
    assert (engine["names"], engine["port"]) == (["engine"], 8100)
    assert config["rule_files"] == [RULES_FILE]
    directory = str(Path(RULES_FILE).parent)
    assert f"rules:{directory}:ro" in SERVICES["prometheus"]["volumes"]
    assert f"rules:{directory}" in SERVICES["setup"]["volumes"]
    # A new volume takes the owner of the image's directory.
    assert f"--owner=10001 --group=10001 {directory}\n" in (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (peer,) = config["alerting"]["alertmanagers"]
    assert peer["static_configs"] == [{"targets": ["alertmanager:9093"]}]


def test_a_restart_of_prometheus_ends_no_alert_that_waits_for_minutes() -> None:
    """It forgets since when an alert fires whose `for` is below its grace period, ten minutes unless set."""
    name = "--rules.alert.for-grace-period="
    grace = [word.removeprefix(name) for word in SERVICES["prometheus"]["command"] if word.startswith(name)]
    waits = {alert["for"] for alert in alerts() if "for" in alert}
    assert grace == ["30s"]
    assert all(wait.endswith("m") for wait in waits)


def test_the_rules_link_the_addresses_that_the_environment_names(tmp_path: Path) -> None:
    setup = SERVICES["setup"]
    by_the_shell = Template(setup["command"][0].replace("$$", "$")).substitute(setup["environment"])
    _, _, generate = by_the_shell.rpartition("&& driftguard ")
    written = generate.replace(RULES_FILE, str(tmp_path / "rules.yaml"))
    result = CliRunner().invoke(app, written.split())
    assert (result.exit_code, result.output) == (0, "")
    expected = RuleParameters(base_url=EXAMPLE["EXTERNAL_URL"], grafana_url=EXAMPLE["GRAFANA_URL"])
    assert (tmp_path / "rules.yaml").read_text(encoding="utf-8") == rules_file(expected)


def test_alertmanager_finds_its_templates_beside_its_configuration() -> None:
    directories = {str(Path(pattern).parent) for pattern in load(ALERTMANAGER)["templates"]}
    (directory,) = directories
    assert f"./alerts/{directory}:/etc/alertmanager/{directory}:ro" in SERVICES["alertmanager"]["volumes"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_takes_the_configuration() -> None:
    config = DEPLOY / "compose" / "prometheus.yml"
    subprocess.run(["promtool", "check", "config", "--syntax-only", config], check=True, capture_output=True)


def test_grafana_finds_the_dashboards_and_this_prometheus() -> None:
    volumes = dict(volume.split(":")[:2] for volume in SERVICES["grafana"]["volumes"])
    (provider,) = documents(ROOT / "dashboards" / "provisioning" / "dashboards" / "driftguard.yaml")
    (directory,) = [
        source for source, target in volumes.items() if target == provider["providers"][0]["options"]["path"]
    ]
    assert {file.stem for file in (ROOT / directory).glob("*.json")} == DASHBOARDS.keys()
    (file,) = (DEPLOY / "compose" / "datasources").iterdir()
    (source,) = documents(file)[0]["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    assert volumes["./deploy/compose/datasources"] == "/etc/grafana/provisioning/datasources"


@pytest.mark.parametrize("name", ["prometheus", "alertmanager"])
def test_links_in_pages_lead_to_the_addresses_that_the_environment_names(name: str) -> None:
    command = SERVICES[name]["command"]
    assert f"--web.external-url={EXAMPLE[f'{name.upper()}_URL']}" in command
    assert "--web.route-prefix=/" in command  # so that a path in the address moves nothing

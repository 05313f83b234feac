"""The units: systemd takes them, they are locked down, and what they run is ours."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zoneinfo
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from driftguard.retraining.ledger.outcome import EXIT_CODES
from driftguard.settings.loading import load_settings
from tests.deploy.committed import DEPLOY, parse_command, set_environment

DOCS = DEPLOY.parent / "docs"
UNITS = sorted((DEPLOY / "systemd").iterdir())
SERVICES = [unit for unit in UNITS if unit.suffix == ".service"]
COMMAND = "/opt/driftguard/bin/driftguard"
EXPOSURE = 20  # of 100, systemd's own measure; an ordinary service has 96
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")


def section(unit: Path, name: str) -> list[tuple[str, str]]:
    lines = unit.read_text(encoding="utf-8").partition(f"[{name}]\n")[2].partition("\n[")[0].splitlines()
    return [(key, value) for key, _, value in (line.partition("=") for line in lines) if value]


def service(unit: Path) -> dict[str, str]:
    return dict(section(unit, "Service"))


@pytest.mark.parametrize("unit", SERVICES, ids=lambda unit: unit.name)
def test_it_runs_a_command_with_settings_of_ours(unit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, *arguments = service(unit)["ExecStart"].split()
    assert command == COMMAND
    parse_command(arguments)
    variables = dict(value.split("=", 1) for key, value in section(unit, "Service") if key == "Environment")
    assert variables.pop("DRIFTGUARD_CONFIG") == "/etc/driftguard/driftguard.toml"
    set_environment(monkeypatch, variables)
    if arguments != ["proxy"]:  # which writes nothing
        assert load_settings().data_directory == Path("/var/lib") / service(unit)["StateDirectory"]


def test_the_retraining_fails_only_where_the_command_says_so() -> None:
    (retrain,) = [unit for unit in SERVICES if "retrain" in unit.name]
    fine = {int(code) for code in service(retrain)["SuccessExitStatus"].split()} | {0}
    assert fine == {EXIT_CODES["promoted"], EXIT_CODES["nothing_to_do"], EXIT_CODES["rejected"]}
    assert (DEPLOY / "systemd" / f"{retrain.stem}.timer").exists()


EXAMPLES = re.compile(r"DRIFTGUARD_DATABASE_URL=\S*\.\.\.[^\s,]*")


@pytest.mark.parametrize(
    "file", [DEPLOY / "systemd" / "driftguard.service", DOCS / "production.md"], ids=lambda file: file.name
)
def test_a_shell_reads_the_address_of_the_database_as_systemd_does(tmp_path: Path, file: Path) -> None:
    """The guides let it read the same file, for `driftguard db upgrade` and backups. An address has & where
    it has two options, as for TLS and for standbys."""
    options = "db-1,db-2/driftguard?sslmode=verify-full&sslrootcert=/etc/ca.crt&user=$HOME"
    (example,) = EXAMPLES.findall(file.read_text(encoding="utf-8"))
    (tmp_path / "driftguard.env").write_text(example.replace("postgresql://...", f"postgresql://{options}"))
    read = f"set -a && . {tmp_path}/driftguard.env && set +a; printenv DRIFTGUARD_DATABASE_URL"
    shell = subprocess.run(["sh", "-c", read], capture_output=True, text=True, check=False)
    assert shell.stdout == f"postgresql://{options}\n"


@pytest.mark.parametrize("unit", SERVICES, ids=lambda unit: unit.name)
def test_systemd_starts_it_again_however_often_it_has_failed(unit: Path) -> None:
    """Unless told otherwise it gives up for good after five starts in ten seconds: an address that its
    machine has only some seconds later would keep clients from the engine until somebody looks."""
    if "Restart" not in service(unit):  # started by a timer
        return
    limit = dict(section(unit, "Unit")).get("StartLimitIntervalSec", "10")
    between = float(service(unit)["RestartSec"].removesuffix("s"))  # a start that fails may take no time
    assert int(limit) == 0 or 5 * between > int(limit)


NIGHT_JOBS = {
    DEPLOY
    / "systemd"
    / "driftguard-retrain.timer": r"^OnCalendar=\*-\*-\* (?P<hour>\d+):(?P<minute>\d+):00$",
    DEPLOY
    / "kubernetes"
    / "engine"
    / "retrain.yaml": r'^  schedule: "(?P<minute>\d+) (?P<hour>\d+) \* \* \*"$',
    DOCS / "nightly-retraining.md": r"^(?P<minute>\d+) (?P<hour>\d+) \* \* \*  driftguard ",
}
ZONES = [  # one for each hour at which clocks are put forward or back somewhere
    "Africa/Cairo",
    "America/New_York",
    "America/Nuuk",
    "America/Santiago",
    "Atlantic/Azores",
    "Australia/Lord_Howe",
    "Europe/Athens",
    "Europe/Berlin",
    "Europe/London",
    "Pacific/Chatham",
    "Pacific/Easter",
]


@pytest.mark.parametrize("file", NIGHT_JOBS, ids=lambda file: file.name)
def test_the_retraining_runs_once_every_night_in_every_time_zone(file: Path) -> None:
    """Where clocks are put forward over its time systemd and Kubernetes leave the night out, and the job is
    reported as stale; where they are put back over it, it may run twice."""
    (found,) = re.finditer(NIGHT_JOBS[file], file.read_text(encoding="utf-8"), re.MULTILINE)
    first = datetime(2027, 1, 1, int(found["hour"]), int(found["minute"]))
    for zone in map(zoneinfo.ZoneInfo, ZONES):
        for day in range(365):
            night = (first + timedelta(days=day)).replace(tzinfo=zone)
            assert night.utcoffset() == night.replace(fold=1).utcoffset(), f"{night} in {zone}"


@pytest.fixture
def installed(tmp_path: Path) -> list[Path]:
    """With a command that there is on this machine."""
    copies = []
    for unit in UNITS:
        copy = tmp_path / unit.name
        copy.write_text(unit.read_text(encoding="utf-8").replace(COMMAND, sys.executable), encoding="utf-8")
        copies.append(copy)
    return copies


@needs_systemd
def test_systemd_has_nothing_to_say(installed: list[Path]) -> None:
    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *installed], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout + found.stderr) == (0, "")


@needs_systemd
def test_systemd_finds_them_locked_down(installed: list[Path]) -> None:
    for unit in installed:
        if unit.suffix == ".service":
            subprocess.run(
                ["systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE}", unit],
                capture_output=True, check=True,
            )  # fmt: skip

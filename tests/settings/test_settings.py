"""Settings: the order of sources, and that unknown keys are refused by name."""

from __future__ import annotations

import os
import re
from math import inf, nan
from pathlib import Path

import pytest

from driftguard.app import detector_config
from driftguard.errors import BadSettings
from driftguard.settings import ORDER_VARIABLES, Settings
from driftguard.settings.loading import CONFIG_VARIABLE, describe_settings, load_settings

RESTARTED = """
[[engines]]
server = "chat"
target_directory = "/models/target"
draft_directory = "/models/draft"
num_speculative_tokens = 4
"""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, "")


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_command_line_then_environment_then_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(
        tmp_path / "d.toml", "port = 1\nhost = '127.0.0.3'\n[capture]\nmax_requests_per_segment = 5\n"
    )
    monkeypatch.setenv("DRIFTGUARD_PORT", "2")
    monkeypatch.setenv("DRIFTGUARD_CAPTURE__ENABLED", "true")
    settings = load_settings(file)
    assert (settings.port, settings.host) == (2, "127.0.0.3")
    assert (settings.capture.enabled, settings.capture.max_requests_per_segment) == (True, 5)
    assert load_settings(file, port=3).port == 3


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("prot = 1", "prot: no such setting; did you mean port? `driftguard settings` lists them all"),
        ("[capture]\nenable = true", "capture.enable: no such setting; did you mean capture.enabled?"),
        ("[captre]\nenabled = true", "captre: no such setting; did you mean capture?"),
        (
            "[[sources]]\nurl = 'http://a'\nservre = 'a'",
            "sources.0.servre: no such setting; did you mean server? [[sources]] takes url, kind, server,",
        ),
        (
            "[[probes.targets]]\nserver = 'a'\nurl = 'http://a'\nmetrics = 1",
            "probes.targets.0.metrics: no such setting; [[probes.targets]] takes server, url, model, engine,",
        ),
        ("[[sources]]\nserver = 'a'", "sources.0.url: needed, but not set"),
        ("[alerting]\n[Alerting]\nwebhook_urls = []", "alerting and Alerting: one setting by two names"),
        ("port = true", "port: cannot be true or false"),
        ("host = ''", "host: string should have at least 1 character, not ''"),
        ("[proxy]\nhost = ''", "proxy.host: string should have at least 1 character"),
        ("[proxy]\nadmin_host = ''", "proxy.admin_host: string should have at least 1 character"),
        ("[retention]\nrecords_days = true", "retention.records_days: cannot be true or false"),
        (
            "[[sources]]\nurl = 'http://a'\nnum_speculative_tokens = true",
            "sources.0.num_speculative_tokens: ",
        ),
        ("[capture]\nenabled = 'maybe'", "capture.enabled: input should be a valid boolean, not 'maybe'"),
        (
            "[[sources]]\nurl = 'chat:8000'",
            "sources.0.url: does not begin with http:// or https:// and",
        ),
        (
            "[alerting]\nalertmanager_urls = ['alertmanager:9093']",
            "http:// or https:// and a host, not 'alertmanager:9093'",
        ),
        (
            "[alerting]\nwebhook_urls = ['http://a', 'hooks.example.com/T0/hunter2']",
            "webhook_urls.1: does not begin with http:// or https:// and a host, not 'hooks.example.com/...'",
        ),
        ("[alerting]\nwebhook_urls = ['me:hunter2@hooks.example.com']", "webhook_urls.0: does not"),
        ("[alerting]\nexternal_url = 'driftguard.example.com'", "alerting.external_url: does not begin"),
        *(
            (
                f"[alerting]\nexternal_url = 'https://ops.example.com{path}'",
                "alerting.external_url: is not https:",
            )
            for path in (
                *(
                    "?team=llm",
                    "/a?team=llm",
                    "/a#b",
                    "/..",
                    "/a/../b",
                    "/.",
                    "//",
                    "/a//b",
                    "/%2e%2e",
                    "/a b",
                ),
                *("/a;b", "\\\\a", "/a\\\\b"),
            )
        ),
        (
            "[alerting]\nexternal_url = 'https://ops.example.com/api/'",
            "alerting.external_url: the path /api is one of the sidecar's own",
        ),
        ("[alerting]\ngrafana_url = 'grafana:3000'", "alerting.grafana_url: does not begin"),
        ("clusters = {eu = 'chat-1'}", "clusters.eu: input should be a valid list"),
        ("[alerting]\nlabels = {server = 'a'}", "alerting.labels: an alert has its own server"),
        ("[alerting]\nlabels = {'a-b' = 'a'}", "alerting.labels: 'a-b' is not a label name"),
        ("[alerting]\nlabels = {cluster = ''}", "alerting.labels: cluster has no value"),
        ("port = 70000", "port: input should be less than or equal to 65535, not 70000"),
        ("port = ", "not valid TOML"),
        ("[[engines]]\nserver = 'a'", "engines.0: a needs admin_url (the built-in engine), or"),
        (
            "[retraining]\npromote_command = ['a']\npromote_webhook = 'http://b'",
            "retraining: promote_command and promote_webhook are both set",
        ),
        ("[retraining]\npromote_webhook = 'b'", "retraining.promote_webhook: does not begin with"),
        (
            "[retraining]\npromote_command = 'restart --token hunter2'",
            "retraining.promote_command: input should be a valid list",
        ),
        (
            "[engines]\nserver = 'a'\nadmin_url = 'http://a'\napi_key = 'hunter2'",
            "engines: is one table, not a list of them; TOML writes each of a list as [[engines]]",
        ),
        ("proxy = [{upstream_api_key = 'hunter2'}]", "proxy: input should be a valid dictionary"),
        ("database_url = ['host=db password=hunter2']", "database_url: input should be a valid string"),
        ("[retraining]\npromote_webhook_key = 'hunter2'", "but promote_webhook is not"),
        (RESTARTED, "engines: chat has no admin_url, so retraining.promote_command or"),
        (
            RESTARTED + "admin_url = 'http://a'",
            "target_directory, draft_directory, num_speculative_tokens: leave",
        ),
        (
            "[[engines]]\nserver = 'a'\nadmin_url = 'http://a'\nacceptance_rule = 'match'",
            "acceptance_rule: leave out if there is an admin_url",
        ),
        (
            "[[engines]]\nserver = 'a'\nadmin_url = 'http://a'\nupdate_url = 'http://b'",
            "update_url: leave out if there is an admin_url",
        ),
        (
            "[[engines]]\nserver = 'a'\nadmin_url = '127.0.0.1:8100'",
            "engines.0.admin_url: does not begin with http:// or https:// and a host, not '127.0.0.1:8100'",
        ),
        (
            "[[probes.targets]]\nserver = 'a'\nurl = '127.0.0.1:8000'",
            "probes.targets.0.url: does not begin with http:// or https:// and a host, not '127.0.0.1:8000'",
        ),
        (
            "[[probes.targets]]\nserver = 'a'\nurl = 'http://chat 1:8000'",
            "probes.targets.0.url: its host or port cannot be read",
        ),
        (
            "proxy.upstream = '127.0.0.1:8000'",  # which the sidecar asks canary probes of
            "proxy.upstream: does not begin with http:// or https:// and a host, not '127.0.0.1:8000'",
        ),
        ("proxy.sidecar = 'drift:8200'", "proxy.sidecar: does not begin with http:// or https:// and a host"),
        (RESTARTED + "update_engine = 'sglang'", "update_engine: needs an update_url"),
        (
            "".join(f"[[engines]]\nserver = 'a'\nadmin_url = 'http://{host}'\n" for host in "ab"),
            "engines: two are called 'a'",
        ),
        (
            "".join(f"[[probes.targets]]\nserver = 'a'\nurl = 'http://{host}'\n" for host in "ab"),
            "probes: two targets are called 'a'",
        ),
        (RESTARTED + "update_url = 'chat:8000'", "engines.0.update_url: does not begin with http://"),
        (
            RESTARTED + "acceptance_rule = 'argmax'",
            "engines.0.acceptance_rule: input should be 'rejection', 'match' or 'typical'",
        ),
        ("[retraining]\npromote_command = ['a']", "promote_command is set, but there are no engines without"),
        (
            "[retention]\nrecords_days = 60",
            "retention: minute_rollups_days (35) is less than records_days (60)",
        ),
        (
            "[retention]\nrollups_days = 1000000",
            "retention.rollups_days: input should be less than or equal to 36500, not 1000000",
        ),
        ("[retention]\nrollups_days = 20", "retention: rollups_days (20) is less than records_days (30)"),
        ("[[sources]]\nurl = 'http://[::1'", "sources.0.url: its host or port cannot be read"),
        ("[[sources]]\nurl = 'http://chat..internal:8000'", "sources.0.url: its host or port cannot be read"),
        ("[[sources]]\nurl = 'http://:8000/metrics'", "sources.0.url: its host or port cannot be read"),
        ("[[sources]]\nurl = 'http://chat 1:8000'", "sources.0.url: its host or port cannot be read"),
        ("[[sources]]\nurl = 'http://chat :8000'", "sources.0.url: its host or port cannot be read"),
        (
            f"[alerting]\nwebhook_urls = ['http://{'a' * 64}.example.com/hunter2']",
            "alerting.webhook_urls.0: its host or port cannot be read",
        ),
        (
            "[alerting]\nexternal_url = 'http://h:hunter2'",
            "alerting.external_url: its host or port cannot be",
        ),
        (
            "[probes]\ninterval_seconds = inf",
            "probes.interval_seconds: input should be less than or equal to",
        ),
        ("[proxy]\ndraft = ''", "proxy.draft: "),
        ("[proxy]\ndraft_version = ''", "proxy.draft_version: "),
        ("[proxy]\nmethod = ''", "proxy.method: "),
        ("[proxy]\nnum_speculative_tokens = 1025", "proxy.num_speculative_tokens: "),
        ("[scraping]\ninterval_seconds = inf", "scraping.interval_seconds: input should be less than or"),
        ("[retention]\nminute_rollups_days = 7\nrecords_days = 7", "retention.minute_rollups_days"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, toml: str, words: str) -> None:
    with pytest.raises(BadSettings) as refusal:
        load_settings(write(tmp_path / "d.toml", toml))
    assert words in str(refusal.value)
    assert "hunter2" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("false_alarm_days", 1e-6, 1e9),
        ("false_alarm_minimum_requests", 100.0, 1e15),
        ("minimum_drop", 0.002, 0.9),
        ("ignore", 0.0, 0.5),
    ],
)
def test_what_the_detector_would_refuse_is_refused_by_its_name_in_the_settings(
    tmp_path: Path, name: str, least: float, most: float
) -> None:
    for bound in (least, most):
        detector_config(load_settings(write(tmp_path / "c.toml", f"detection.{name} = {bound!r}")))
    for beyond in (least * 0.99 - 1e-9, most * 1.01, inf, nan):
        config = write(tmp_path / "c.toml", f"detection.{name} = {beyond!r}")
        with pytest.raises(BadSettings, match=rf"^detection\.{name}: "):
            load_settings(config)


@pytest.mark.parametrize(
    "name",
    [
        "retraining.wait_seconds",
        "retraining.promote_timeout_seconds",
        "retraining.promote_wait_seconds",
        "diagnosis.score_seconds",
        "scraping.timeout_seconds",
        "probes.timeout_seconds",
        "probes.pause_seconds",
        "proxy.connect_timeout_seconds",
        "proxy.read_timeout_seconds",
        "proxy.shutdown_grace_seconds",
    ],
)
def test_a_wait_that_no_clock_can_be_set_to_is_refused(tmp_path: Path, name: str) -> None:
    for seconds in (inf, 1e15):
        config = write(tmp_path / "c.toml", f"{name} = {seconds!r}")
        with pytest.raises(BadSettings, match=f"^{name}: "):
            load_settings(config)


def test_an_engine_that_is_updated_live_needs_nothing_that_restarts_it(tmp_path: Path) -> None:
    (engine,) = load_settings(
        write(tmp_path / "d.toml", RESTARTED + "update_url = 'http://chat:8000'")
    ).engines
    assert engine.update_url == "http://chat:8000"


def test_a_file_that_can_be_read_only_once_is_read() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader):
        with os.fdopen(writer, "w") as file:
            file.write("port = 8311\n")
        assert load_settings(Path(f"/dev/fd/{reader}")).port == 8311


def test_a_cluster_may_name_a_server_by_its_ipv6_address() -> None:
    """In a pattern brackets hold characters to choose from."""
    name = "[2001:db8::1]:8000"
    settings = Settings(clusters={"us": ["chat-*"], "eu": [name]})
    assert [settings.cluster_of(server) for server in (name, "chat-1", "1")] == ["eu", "us", None]


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match="cannot be read"):
        load_settings(tmp_path / "none.toml")


def test_a_file_may_begin_with_the_mark_that_editors_of_windows_write(tmp_path: Path) -> None:
    path = tmp_path / "driftguard.toml"
    path.write_bytes(b"\xef\xbb\xbfport = 8201\r\n")
    assert load_settings(path).port == 8201


def test_an_unknown_variable_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIFTGUARD_CAPTRUE__ENABLED", "true")
    told = "DRIFTGUARD_CAPTRUE__ENABLED: no such setting; did you mean DRIFTGUARD_CAPTURE__ENABLED?"
    with pytest.raises(BadSettings, match=re.escape(told)):
        load_settings()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DRIFTGUARD_SOURCES", "hunter2"),
        ("DRIFTGUARD_CLUSTERS", "{eu: [hunter2]}"),
        ("DRIFTGUARD_ALERTING__WEBHOOK_URLS", "http://hooks/hunter2"),
    ],
)
def test_a_variable_that_is_not_json_is_named(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(BadSettings) as refused:
        load_settings()
    assert str(refused.value).startswith(f"{variable}: not JSON")
    assert "hunter2" not in str(refused.value)


def test_a_data_directory_in_a_home_that_is_not_there_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DRIFTGUARD_DATA_DIR", "~no-such-user/data")
    with pytest.raises(BadSettings, match=r"^data_dir: ~no-such-user/data: there is no such home"):
        _ = load_settings().data_directory


def test_a_driftguard_that_a_promotion_runs_takes_its_order_for_no_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ORDER_VARIABLES:
        monkeypatch.setenv(name, "x")
    file = write(tmp_path / "d.toml", "[retraining]\npromote_command = ['restart', '--now']\n" + RESTARTED)
    settings = load_settings(file)
    assert settings.retraining.promote_command == ["restart", "--now"]
    assert settings.engines[0].draft_directory == Path("/models/draft")


def test_secrets_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIFTGUARD_DATABASE_URL", "postgresql://user:hunter2@db/x")
    assert "hunter2" not in repr(load_settings())


def test_every_setting_says_what_it_means() -> None:
    described = list(describe_settings())
    assert len(described) > 25
    assert [name for name, _, meaning in described if not meaning] == []


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DRIFTGUARD_RETRAINING__PROMOTE_WEBHOOK", "ftp://user:hunter2@host/hunter2"),
        ("DRIFTGUARD_RETRAINING__PROMOTE_WEBHOOK", "hunter2://host"),
        ("DRIFTGUARD_SOURCES", '[{"url": "http://a b:hunter2@host", "api_key": ["hunter2"]}]'),
        ("DRIFTGUARD_SOURCES", '[{"url": "http://host", "api_key": "hunter2\\r\\nX: y"}]'),
        ("DRIFTGUARD_PROXY__UPSTREAM_API_KEY", "hunter2\u00fc"),
        ("DRIFTGUARD_SOURCES", '{"url": "http://host", "api_key": "hunter2"}'),
    ],
)
def test_a_secret_that_is_refused_is_not_told(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(BadSettings) as refused:
        load_settings()
    assert "hunter2" not in str(refused.value)

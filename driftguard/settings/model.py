"""Every setting of the sidecar, with its default; loading.py reads them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from driftguard.errors import BadSettings
from driftguard.masking import address

PREFIX = "DRIFTGUARD_"
URL_PATTERN = r"^https?://[^\s/]+"
# Variables for retraining.promote_command; a `driftguard` that it runs must not read these as settings.
ORDER_VARIABLES = frozenset(
    PREFIX + name
    for name in (
        "ACTION",
        "RUN_ID",
        "SERVER",
        "TARGET",
        "METHOD",
        "DRAFT_PATH",
        "DRAFT_VERSION",
        "PREVIOUS_PATH",
        "PREVIOUS_VERSION",
    )
)

_LABEL_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")  # of Prometheus' data model
# Of the alerts that the sidecar posts, by driftguard/alerting/alertmanager.py.
_ALERT_LABELS: Final = frozenset(
    {"alertname", "server", "target", "draft_version", "method", "severity", "incident"}
)

# Where paths of the sidecar begin: with a prefix that is one of them, or above one, a path would have two
# meanings.
OWN_PATHS: Final = tuple(
    f"/{name}/"
    for name in (
        *("alerts", "api/v1", "configuration", "dashboards", "docs", "healthz", "incidents", "metrics"),
        *("readyz", "retraining", "runbooks", "static", "streams", "v1"),
    )
)
_EXTERNAL_URL: Final = re.compile(r"https?://[^\s/\\?#]+((?:/(?!\.\.?(?:/|$))[A-Za-z0-9._~-]+)*)/?")


def _with_host_and_port(url: str) -> str:
    if not is_readable_url(url) or not urlsplit(url).hostname:
        raise ValueError("its host or port cannot be read")
    return url


def is_readable_url(url: str) -> bool:
    """Whether its host and port are those of an address: no part of a name is empty or too long, and no space
    is in it. A host may be missing."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        _ = parts.port, host.encode("idna")  # as the look-up of a name does
    except ValueError:
        return False
    return not any(map(str.isspace, host))


def _given_twice(names: Sequence[str]) -> str | None:
    """The first name that is there again."""
    return next((name for place, name in enumerate(names) if name in names[:place]), None)


Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveInt = Annotated[int, Field(ge=1)]
Days = Annotated[int, Field(ge=1, le=36_500)]  # dates end with the year 9999, and begin with the year 1
Interval = Annotated[float, Field(gt=0, le=365 * 86_400)]  # seconds; no clock adds up to infinity
Text = Annotated[str, Field(min_length=1, max_length=256)]
FalseAlarmScope = Literal["stream", "fleet"]
AskedEngine = Literal["auto", "vllm", "sglang", "llamacpp", "driftguard", "other"]
Url = Annotated[str, Field(pattern=URL_PATTERN), AfterValidator(_with_host_and_port)]
LabelSource = Annotated[str, Field(pattern=r"^(header:.+|json:.+|path|model)$")]


def _as_sent(key: SecretStr) -> SecretStr:
    """White space around a key, as of a file that ends its line, is no part of it. Raises ValueError, without
    the key, where no header can hold it."""
    text = key.get_secret_value().strip()
    if not (text.isascii() and text.isprintable()):
        raise ValueError("not a key: it has other characters than letters, digits and signs of ASCII")
    return SecretStr(text)


Key = Annotated[SecretStr, AfterValidator(_as_sent)]


class _NoSwitchForANumber(BaseModel):
    """pydantic would take true for 1, as a day of retention."""

    @field_validator("*", mode="before")
    @classmethod
    def _is_none_of_a_switch(cls, value: object, told: ValidationInfo) -> object:
        kind = cls.model_fields[told.field_name or ""].annotation
        if isinstance(value, bool) and bool not in (kind, *get_args(kind)):
            raise ValueError("cannot be true or false")
        return value


class _Group(_NoSwitchForANumber):
    model_config = ConfigDict(extra="forbid", frozen=True)


class IngestSettings(_Group):
    max_batch_records: PositiveInt = Field(
        5_000, description="Records in one POST; more is refused with 413."
    )
    max_batch_bytes: PositiveInt = Field(
        6_000_000, description="Bytes in one POST; more is refused with 413."
    )
    max_queued_records: PositiveInt = Field(
        100_000, description="Records waiting for the database; more is refused with 429 and Retry-After."
    )
    max_otlp_fields: PositiveInt = Field(
        600_000,
        description="Fields in one OTLP export, at every depth; more is refused with 413. A span of 20 "
        "attributes has about 100.",
    )
    max_otlp_items: PositiveInt = Field(
        50_000,
        description="Spans in one OTLP export, or data points, with the metrics, scopes and resources that "
        "hold them; more is refused with 413. A collector sends 8,192 spans or points at once.",
    )
    max_streams: PositiveInt = Field(
        20_000, description="Streams in the database; records that would begin another one are refused."
    )


class HttpSettings(_Group):
    allowed_hosts: list[Text] = Field(
        default_factory=list,
        description="Host names accepted in requests, beside the sidecar's own and that of "
        "alerting.external_url. Bound to another address than loopback, any name is accepted without this.",
    )
    require_key_to_read: bool = Field(
        False,
        description="On another address than loopback, ask for an API key for pages, reads and metrics too; "
        "a browser gives it as the password of its login.",
    )
    max_connections: PositiveInt = Field(
        512,
        description="Connections at once, at most half of the descriptors that the process may open; beyond "
        "that the one that is idle longest is closed.",
    )
    max_exports: PositiveInt = Field(
        4, description="Exports at once; more are refused with 503 and Retry-After."
    )


class RetentionSettings(_Group):
    records_days: Days = Field(30, description="Days to keep records; older partitions are dropped.")
    minute_rollups_days: Annotated[Days, Field(ge=8)] = Field(
        35, description="Days to keep rollups per minute; no fewer than records_days."
    )
    hourly_rollups_days: Annotated[Days, Field(ge=61)] = Field(
        400, description="Days to keep rollups per hour; charts of up to 60 days are made of them."
    )
    rollups_days: Days = Field(
        1_830, description="Days to keep rollups per day; no rollup is kept for longer."
    )
    captures_days: Days = Field(7, description="Days to keep captured token ids.")
    partitions_ahead: PositiveInt = Field(7, description="Daily partitions created ahead of today.")

    @model_validator(mode="after")
    def _rollups_outlive_records(self) -> Self:
        for name in ("minute_rollups_days", "rollups_days"):
            if getattr(self, name) < self.records_days:
                raise ValueError(
                    f"{name} ({getattr(self, name)}) is less than records_days ({self.records_days}); "
                    "every record that is accepted has rollups: raise the one or lower the other"
                )
        return self


class DetectionSettings(_Group):
    # As DetectorConfig takes them: else the sidecar alone would refuse them.
    false_alarm_days: Annotated[float, Field(ge=1e-6, le=1e9)] = Field(
        90.0, description="At most one false page in this many days, at the measured traffic."
    )
    false_alarm_scope: FalseAlarmScope = Field(
        "stream",
        description='Scope of false_alarm_days: "stream", each stream; "fleet", all streams in service '
        "together, which detects a change of a single stream a little later.",
    )
    false_alarm_minimum_requests: Annotated[float, Field(ge=100, le=1e15)] = Field(
        100_000.0, description="The expected number of requests to a false alarm is never set below this."
    )
    minimum_drop: Annotated[float, Field(ge=0.002, le=0.9)] = Field(
        0.05,
        description="Smallest drop in acceptance worth detecting; sets the size of the reference period.",
    )
    ignore: Annotated[float, Field(ge=0, le=0.5)] = Field(
        0.005, description="Changes of acceptance smaller than this are never reported."
    )


class CaptureSettings(_Group):
    enabled: bool = Field(False, description="Keep token ids of sampled requests, for retraining.")
    max_requests_per_segment: PositiveInt = Field(
        4_000, description="Newest captured requests kept per stream and segment."
    )


class EngineSettings(_Group):
    server: str = Field(description="The server's name in its records.")
    admin_url: Url | None = Field(
        None, description="Base URL of the built-in engine, for example http://127.0.0.1:8100."
    )
    update_url: Url | None = Field(
        None,
        description="Base URL of a vLLM or an SGLang that loads a draft without a restart; only without "
        "admin_url. Its routes that exchange weights must be reachable there, and nowhere else.",
    )
    update_engine: Literal["vllm", "sglang", "sglang_ngram"] = Field(
        "vllm", description="What is at update_url; sglang_ngram: an SGLang that drafts by n-grams."
    )
    api_key: Key | None = Field(None, description="Key for admin_url or update_url, if it needs one.")
    target_directory: Path | None = Field(
        None,
        description="Target's model directory on this machine, for sglang_ngram of its tokenizer; only "
        "without admin_url.",
    )
    draft_directory: Path | None = Field(
        None,
        description="Model directory on this machine of the first draft; only without admin_url, and not for "
        "sglang_ngram.",
    )
    num_speculative_tokens: PositiveInt | None = Field(
        None, description="K of the server; only without admin_url."
    )
    acceptance_rule: Literal["rejection", "match", "typical"] | None = Field(
        None,
        description="How the server keeps draft tokens: rejection (drafts are sampled, and kept by rejection "
        "sampling), match (the likeliest token is drafted, and kept where the target draws the same) or "
        "typical acceptance; only without admin_url.",
    )

    @property
    def admin_address(self) -> str | None:
        """What may be shown of admin_url."""
        return None if self.admin_url is None else address(self.admin_url)

    @model_validator(mode="after")
    def _is_reached_one_way(self) -> Self:
        if self.update_engine != "vllm" and self.update_url is None:
            raise ValueError("update_engine: needs an update_url")
        described: dict[str, object] = {
            "target_directory": self.target_directory,
            "draft_directory": self.draft_directory,
            "num_speculative_tokens": self.num_speculative_tokens,
        }
        if self.admin_url is not None:
            described |= {"acceptance_rule": self.acceptance_rule, "update_url": self.update_url}
            extra = [name for name, value in described.items() if value is not None]
            if extra:
                raise ValueError(f"{', '.join(extra)}: leave out if there is an admin_url, which provides it")
            return self
        if self.update_engine == "sglang_ngram":
            del described["draft_directory"]
            if self.draft_directory is not None:
                raise ValueError("draft_directory: leave out for sglang_ngram, which has no draft model")
        if missing := [name for name, value in described.items() if value is None]:
            raise ValueError(
                f"{self.server} needs admin_url (the built-in engine), or, if it restarts for a new "
                f"draft, {', '.join(missing)}"
            )
        return self


class RetrainingSettings(_Group):
    automatic: bool = Field(True, description="Start a retraining when an incident calls for it.")
    minimum_requests: PositiveInt = Field(
        128, description="Captured requests below which retraining is refused."
    )
    aim_requests: PositiveInt = Field(
        512, description="Captured requests of the changed segments to wait for."
    )
    wait_seconds: Interval = Field(
        3_600.0, description="Longest wait for aim_requests; then minimum_requests suffice."
    )
    steps: PositiveInt = Field(150, description="Optimiser steps of one distillation.")
    threads: PositiveInt = Field(2, description="CPU threads of the training process.")
    heldout_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.2, description="Fraction of the captured traffic that is not trained on, but used by the gate."
    )
    maximum_regression: Fraction = Field(
        0.02,
        description="Largest loss in any segment that the gate allows, of single draft tokens that are kept.",
    )
    minimum_gain: Fraction = Field(
        0.02,
        description="Smallest gain in the changed segments that the gate requires, of single draft tokens "
        "that are kept.",
    )
    corpus_tokens: PositiveInt = Field(
        1_000_000, description="Most tokens of a corpus for drafting by lookup; memory grows with it."
    )
    keep_candidates: PositiveInt = Field(
        5, description="Draft directories kept; older unused ones are removed."
    )
    seed: int = Field(0, description="Seed of the distillation.")
    promote_command: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list,
        description="Program and arguments that restart an engine without admin_url with another draft.",
    )
    promote_webhook: Url | None = Field(
        None,
        description="URL that receives a POST instead of running promote_command.",
    )
    promote_webhook_key: Key | None = Field(
        None, description="Bearer token for promote_webhook, if it needs one."
    )
    promote_timeout_seconds: Interval = Field(
        600.0, description="Longest time for promote_command to end, or for promote_webhook to accept."
    )
    promote_wait_seconds: Interval = Field(
        1_800.0, description="Longest wait, after that, for records of the requested draft."
    )

    @model_validator(mode="after")
    def _is_promoted_one_way(self) -> Self:
        if self.promote_command and self.promote_webhook:
            raise ValueError("promote_command and promote_webhook are both set; leave one out")
        if self.promote_webhook_key and not self.promote_webhook:
            raise ValueError("promote_webhook_key is set, but promote_webhook is not")
        return self


class DiagnosisSettings(_Group):
    least_confidence: Literal["medium", "high"] = Field(
        "medium",
        description="Least confidence of a diagnosis that starts a retraining; high needs probes.",
    )
    score_captures: bool = Field(
        True,
        description="Score captured requests from before and after a fall with the registered target and "
        "draft: whether the engine still accepts what these account for.",
    )
    score_seconds: Interval = Field(
        600.0,
        description="Longest time for scoring the captures of one incident; those done by then count.",
    )


class SourceSettings(_Group):
    url: Url = Field(
        description="Address of its metrics; without a path the engine's usual one.",
    )
    kind: str | None = Field(None, description="The serving engine; detected by its metrics when left out.")
    server: Text | None = Field(
        None, description="The server's name in its records; host:port when left out."
    )
    target: Text | None = Field(
        None, description="The target's name in its records; the server's own when left out."
    )
    draft: Text | None = Field(None, description="The draft's name, if the metrics do not contain it.")
    draft_version: Text | None = Field(
        None, description="The draft's version: a new version is a new stream."
    )
    method: Text | None = Field(None, description="Drafting method: draft_model, eagle3, ngram, ...")
    segment: Text = Field(
        "default", description="Segment of all its traffic: counters do not distinguish requests."
    )
    num_speculative_tokens: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="K as configured, if the metrics do not contain it."
    )
    api_key: Key | None = Field(None, description="Bearer token for its metrics, if they need one.")


class ScrapingSettings(_Group):
    interval_seconds: Annotated[Interval, Field(ge=1)] = Field(
        15.0, description="Time between two scrapes of a server."
    )
    timeout_seconds: Interval = Field(5.0, description="Longest wait for the metrics of a server.")


class ProbeTargetSettings(_Group):
    server: str = Field(description="The server's name as its records carry it.")
    url: Url = Field(description="Base URL of its OpenAI-compatible API, for example http://127.0.0.1:8000.")
    model: str | None = Field(None, description="Model to request; without it the first of /v1/models.")
    engine: AskedEngine = Field(
        "auto", description="What the server is; auto asks its /v1/models. Decides what is asked of it."
    )
    api_key: Key | None = Field(None, description="Key for the API, if it needs one.")


class ProbeSettings(_Group):
    enabled: bool = Field(
        True,
        description="Replay canary probes by itself, on every server of targets, engines, proxy and sources "
        "that an address is known of: with the usual 16 prompts 32 requests an hour, of at most 2,048 tokens "
        "of answers and about 6,600 of prompts, below 0.1% of a server that makes 1,000 tokens/s.",
    )
    targets: list[ProbeTargetSettings] = Field(
        default_factory=list,
        description="Servers to probe whose address nothing else in the settings tells, or that need another "
        "key or model than the rest of the settings says.",
    )
    interval_seconds: Interval = Field(
        3_600.0, description="Time between two replays on one server, while it has traffic."
    )
    pause_seconds: Annotated[float, Field(ge=0, le=365 * 86_400)] = Field(
        0.5, description="Pause between two probes, so that users hardly notice them."
    )
    ask_twice: bool = Field(
        True,
        description="Ask each canary prompt again at once, when the server has it in its prefix cache.",
    )
    max_tokens: PositiveInt = Field(64, description="Tokens of one answer to a probe.")
    timeout_seconds: Interval = Field(60.0, description="Longest wait for one answer to a probe.")

    @model_validator(mode="after")
    def _targets_have_names_of_their_own(self) -> Self:
        if (name := _given_twice([target.server for target in self.targets])) is not None:
            raise ValueError(f"two targets are called {name!r}, of which one would never be asked")
        return self


class AlertingSettings(_Group):
    alertmanager_urls: list[Url] = Field(
        default_factory=list, description="Alertmanager peers; alerts are posted to every one."
    )
    webhook_urls: list[Url] = Field(default_factory=list, description="URLs that receive each page as JSON.")
    labels: dict[str, str] = Field(
        default_factory=dict,
        description="Labels of every alert that this sidecar posts to Alertmanager, such as cluster and "
        "namespace: those by which Prometheus tells its sidecars apart, as its external_labels.",
    )
    page_slowdown: Fraction = Field(
        0.02,
        description="A fall of acceptance that is known to cost less than this part of the tokens per second "
        "pages nobody, until it costs more; 0 pages for every fall.",
    )
    external_url: Url | None = Field(
        None,
        description="Address under which people reach this sidecar; used in links. It has a path where a "
        "reverse proxy serves the sidecar under one.",
    )
    grafana_url: Url | None = Field(
        None,
        description="Address of the Grafana that has the dashboards; without it alerts do not link them.",
    )

    @property
    def prefix(self) -> str:
        """The path of external_url without the slash at its end; empty where it has none."""
        return urlsplit(self.external_url or "").path.rstrip("/")

    @field_validator("external_url")
    @classmethod
    def _has_a_path_that_is_free(cls, url: str | None) -> str | None:
        if url is None:
            return url
        if not (found := _EXTERNAL_URL.fullmatch(url)):
            raise ValueError(
                "is not https://HOST or https://HOST/PATH; a path has letters, digits and - . _ ~ between "
                "single slashes, neither . nor .. alone, and no query behind it"
            )
        prefix = found[1]
        if prefix and any(own.startswith(f"{prefix}/") for own in OWN_PATHS):
            raise ValueError(f"the path {prefix} is one of the sidecar's own; choose another")
        return url

    @field_validator("labels")
    @classmethod
    def _labels_can_be_added(cls, labels: dict[str, str]) -> dict[str, str]:
        for name, value in labels.items():
            if not _LABEL_NAME.fullmatch(name) or name.startswith("__"):
                raise ValueError(f"{name!r} is not a label name")
            if name in _ALERT_LABELS:
                raise ValueError(f"an alert has its own {name}")
            if not value:
                raise ValueError(f"{name} has no value")
        return labels


class MetricsSettings(_Group):
    max_streams: PositiveInt = Field(
        1_000,
        description="Streams with series of their own in /metrics, the worst first. For the others only the "
        "incidents, the number of each verdict and the traffic of all together are shown.",
    )


class ProxySettings(_Group):
    upstream: Url | None = Field(None, description="Base URL of the server behind `driftguard proxy`.")
    host: str = Field(
        "127.0.0.1", min_length=1, description="Address the proxy binds; it has no keys of its own."
    )
    port: Annotated[int, Field(ge=0, le=65535)] = Field(8300, description="Port of the proxy.")
    admin_port: Annotated[int, Field(ge=0, le=65535)] | None = Field(
        None, description="Port for the proxy's own health and metrics; none without it."
    )
    admin_host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="Address of admin_port, which asks for no key; in a pod 0.0.0.0, for probes.",
    )
    workers: Annotated[int, Field(ge=1, le=64)] = Field(
        1, description="Processes that share the proxy's port, if one core is not enough; on Linux."
    )
    max_connections: PositiveInt = Field(
        4_096,
        description="Connections at once of each worker, at most two fifths of the descriptors that it may "
        "open; beyond that those that keep the proxy waiting are closed.",
    )
    sidecar: Url = Field("http://127.0.0.1:8200", description="Sidecar that the proxy sends records to.")
    engine: AskedEngine = Field(
        "auto", description="What the upstream is; auto asks its /v1/models. Decides what is asked of it."
    )
    upstream_api_key: Key | None = Field(
        None,
        description="Key for detecting the upstream's engine and for canary probes; requests have their own.",
    )
    server: str | None = Field(
        None, description="The server's name in records; without it the upstream's host and port."
    )
    target: str | None = Field(
        None, description="The target's name in records; without it the model that each answer names."
    )
    draft: Text = Field("unknown", description="The draft's name in records.")
    draft_version: Text = Field("unknown", description="The draft's version in records.")
    method: Text = Field(
        "unknown", description="Drafting method in records; none means that the upstream does not speculate."
    )
    num_speculative_tokens: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None,
        description="K, if answers do not contain it. Triton's records need it; those of llama.cpp count "
        "passes without a draft as steps where it is not set.",
    )
    segment_from: LabelSource = Field(
        "header:X-DriftGuard-Segment",
        description="Where to read a request's segment: header:NAME, json:FIELD.FIELD, path or model.",
    )
    session_from: LabelSource = Field(
        "header:X-DriftGuard-Session", description="Where to read a request's session, in the same format."
    )
    usage_always: bool = Field(
        False,
        description="Set it if the upstream adds usage to every stream without being asked (vLLM: "
        "--enable-force-include-usage), so that it is not removed.",
    )
    connect_timeout_seconds: Interval = Field(5.0, description="Longest wait for a connection upstream.")
    read_timeout_seconds: Interval = Field(
        600.0, description="Longest time without data from the upstream within a request."
    )
    max_inspected_bytes: PositiveInt = Field(
        8_000_000, description="Larger requests and answers pass through unrecorded."
    )
    max_held_bytes: PositiveInt = Field(
        256_000_000,
        description="Bytes of requests and answers that each worker holds in memory to parse them; beyond "
        "that they pass through unrecorded.",
    )
    max_queued_records: PositiveInt = Field(
        10_000, description="Records waiting in memory for the sidecar; the oldest are dropped beyond that."
    )
    shutdown_grace_seconds: Interval = Field(
        30.0, description="Time for requests in flight to finish when the proxy is stopped."
    )


class Settings(_NoSwitchForANumber, BaseSettings):
    """All settings of the sidecar. `driftguard settings` prints them."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        nested_model_default_partial_update=True,
    )
    in_file: ClassVar[dict[str, Any]] = {}

    database_url: SecretStr | None = Field(
        None, description="PostgreSQL URL; without one the embedded server runs in data_dir."
    )
    data_dir: Path = Field(
        Path("~/.local/share/driftguard"), description="Embedded database, candidates, spool files."
    )
    host: str = Field(
        "127.0.0.1", min_length=1, description="Address to bind; any other than loopback needs an API key."
    )
    port: Annotated[int, Field(ge=0, le=65535)] = Field(8200, description="Port of the sidecar.")
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$", description="debug to error.")
    engines: list[EngineSettings] = Field(default_factory=list, description="Engines that accept new drafts.")
    sources: list[SourceSettings] = Field(
        default_factory=list, description="Servers whose metrics are scraped; also --source KIND=URL."
    )
    clusters: dict[Text, list[Text]] = Field(
        default_factory=dict,
        description="Name of a cluster -> names of its servers, or patterns such as chat-eu-*; of a server "
        "that several match, the first. The fleet can then be grouped by them.",
    )
    scraping: ScrapingSettings = Field(default_factory=ScrapingSettings)
    http: HttpSettings = Field(default_factory=HttpSettings)
    ingest: IngestSettings = Field(default_factory=IngestSettings)
    retention: RetentionSettings = Field(default_factory=RetentionSettings)
    detection: DetectionSettings = Field(default_factory=DetectionSettings)
    capture: CaptureSettings = Field(default_factory=CaptureSettings)
    retraining: RetrainingSettings = Field(default_factory=RetrainingSettings)
    diagnosis: DiagnosisSettings = Field(default_factory=DiagnosisSettings)
    probes: ProbeSettings = Field(default_factory=ProbeSettings)
    alerting: AlertingSettings = Field(default_factory=AlertingSettings)
    metrics: MetricsSettings = Field(default_factory=MetricsSettings)
    proxy: ProxySettings = Field(default_factory=ProxySettings)

    @model_validator(mode="after")
    def _engines_have_names_of_their_own(self) -> Self:
        if (name := _given_twice([engine.server for engine in self.engines])) is not None:
            raise ValueError(f"engines: two are called {name!r}, of which one would never get a draft")
        return self

    @model_validator(mode="after")
    def _restarts_can_be_asked_for(self) -> Self:
        others = [engine for engine in self.engines if engine.admin_url is None]
        restarted = [engine.server for engine in others if engine.update_url is None]
        rules = self.retraining
        promotes = "promote_command" if rules.promote_command else "promote_webhook"
        is_set = bool(rules.promote_command or rules.promote_webhook)
        if restarted and not is_set:
            raise ValueError(
                f"engines: {', '.join(restarted)} has no admin_url, so retraining.promote_command or "
                "retraining.promote_webhook is needed to restart it with a new draft"
            )
        if is_set and not others:
            raise ValueError(f"retraining.{promotes} is set, but there are no engines without admin_url")
        return self

    def cluster_of(self, server: str) -> str | None:
        """None: of a server that no cluster names."""
        named = (
            cluster
            for cluster, patterns in self.clusters.items()
            if any(server == pattern or fnmatchcase(server, pattern) for pattern in patterns)
        )
        return next(named, None)

    @property
    def data_directory(self) -> Path:
        """Raises BadSettings: it is in the home directory of a user who has none."""
        try:
            return self.data_dir.expanduser().resolve()
        except RuntimeError:
            raise BadSettings(
                f"data_dir: {self.data_dir}: there is no such home directory; set data_dir, or HOME"
            ) from None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        del dotenv_settings, file_secret_settings
        return init_settings, env_settings, InitSettingsSource(settings_cls, cls.in_file)

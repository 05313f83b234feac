"""Every Prometheus metric of the engine. Labels are bounded: draft version, position, finish reason, code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from driftguard_engine.adaptive_k.plan import REASONS
from driftguard_engine.core import FinishedRequest, FinishReason
from driftguard_engine.engine import Engine
from driftguard_engine.telemetry.telemetry import Telemetry

PREFIX = "driftguard_engine"
FIRST_TOKEN_BUCKETS_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
PER_TOKEN_BUCKETS_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
REQUEST_BUCKETS_SECONDS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300)


class Metrics:
    """Counts finished requests; everything else is read from the engine when scraped."""

    def __init__(self, engine: Engine, telemetry: Telemetry) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(_EngineState(engine))
        self._registry.register(_TelemetryState(telemetry))
        self._draft_tokens = self._counter("draft_tokens", "Draft tokens offered to the target.")
        self._accepted_tokens = self._counter("accepted_tokens", "Draft tokens that the target accepted.")
        self._emitted_tokens = self._counter(
            "emitted_tokens", "Tokens that verification emitted: accepted ones and one bonus per step."
        )
        self._steps = self._counter("steps", "Verifications, counted per request.")
        self._position_draft_tokens = self._counter(
            "position_draft_tokens", "Draft tokens offered at this position (from 0) of a step.", "position"
        )
        self._position_accepted_tokens = self._counter(
            "position_accepted_tokens",
            "Draft tokens accepted at this position (from 0) of a step.",
            "position",
        )
        self._requests = Counter(
            f"{PREFIX}_requests", "Requests that left the engine.", ["finish_reason"], registry=self._registry
        )
        for reason in get_args(FinishReason):
            self._requests.labels(reason)  # 0, so that rates see the first one
        self._refused = Counter(
            f"{PREFIX}_refused_requests",
            "HTTP requests refused, by error code.",
            ["code"],
            registry=self._registry,
        )
        self._prompt_tokens = Counter(
            f"{PREFIX}_prompt_tokens",
            "Prompt tokens of requests that left the engine.",
            registry=self._registry,
        )
        self._reused_prompt_tokens = Counter(
            f"{PREFIX}_reused_prompt_tokens",
            "Prompt tokens that were not read again, because a slot held them from another request.",
            registry=self._registry,
        )
        self._output_tokens = Counter(
            f"{PREFIX}_output_tokens",
            "Output tokens of requests that left the engine.",
            registry=self._registry,
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds",
            "Seconds from the request's arrival to its first token.",
            FIRST_TOKEN_BUCKETS_SECONDS,
        )
        self._per_token = self._histogram(
            "time_per_output_token_seconds",
            "Mean seconds per output token after the first, per request.",
            PER_TOKEN_BUCKETS_SECONDS,
        )
        self._latency = self._histogram(
            "request_latency_seconds",
            "Seconds from the request's arrival to its end.",
            REQUEST_BUCKETS_SECONDS,
        )

    def finished(self, finished: FinishedRequest) -> None:
        """Adds one request that left the engine."""
        counts, version = finished.counts, finished.draft.version
        self._requests.labels(finished.finish_reason).inc()
        self._prompt_tokens.inc(len(finished.request.prompt_token_ids))
        self._reused_prompt_tokens.inc(finished.reused_prompt_tokens)
        self._output_tokens.inc(len(finished.output_token_ids))
        self._draft_tokens.labels(version).inc(counts.drafted)
        self._accepted_tokens.labels(version).inc(counts.accepted)
        self._emitted_tokens.labels(version).inc(counts.emitted)
        self._steps.labels(version).inc(counts.steps)
        for position, drafted in enumerate(counts.drafted_per_position):
            self._position_draft_tokens.labels(version, position).inc(drafted)
        for position, accepted in enumerate(counts.accepted_per_position):
            self._position_accepted_tokens.labels(version, position).inc(accepted)
        if finished.time_to_first_token_seconds is not None:
            self._first_token.observe(finished.time_to_first_token_seconds)
        if finished.time_per_output_token_seconds is not None:
            self._per_token.observe(finished.time_per_output_token_seconds)
        self._latency.observe((finished.ended_at - finished.started_at).total_seconds())

    def refused(self, code: str) -> None:
        self._refused.labels(code).inc()

    def text(self) -> bytes:
        """The Prometheus text format, version 0.0.4."""
        return generate_latest(self._registry)

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", meaning, ["draft_version", *labels], registry=self._registry)

    def _histogram(self, name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", meaning, buckets=buckets, registry=self._registry)


class _EngineState(Collector):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine, draft = self._engine, self._engine.draft
        info = InfoMetricFamily(PREFIX, "Target, draft in service and verify backend.")
        info.add_metric(
            [],
            {
                "server": engine.config.server_name,
                "target": engine.target_name,
                "draft": draft.name,
                "draft_version": draft.version,
                "method": draft.method,
                "verify_backend": engine.backend,
                "device": engine.config.device,
                "dtype": engine.config.dtype,
            },
        )
        yield info
        slots = engine.config.max_batch
        for name, meaning, value in (
            ("running_requests", "Requests in a slot.", engine.running),
            ("waiting_requests", "Requests queued for a slot.", engine.waiting),
            ("slots", "Slots: the most requests that run at once.", slots),
            (
                "verify_fallback",
                "1 where the reference verifies on a device that the CUDA kernels are meant for.",
                int(engine.backend_fallback is not None),
            ),
            (
                "loop_fallback",
                "1 where steps on a GPU are slower than they could be; the log says why.",
                int(engine.loop_fallback is not None),
            ),
            ("speculation_enabled", "1 while requests may speculate.", int(engine.speculation)),
            (
                "num_speculative_tokens",
                "K where a request does not say.",
                engine.config.num_speculative_tokens,
            ),
            ("cached_tokens", "Tokens of the running requests, prompt and output.", engine.cached_tokens),
            ("cache_capacity_tokens", "Tokens that fit into all slots.", slots * engine.max_length),
        ):
            yield GaugeMetricFamily(f"{PREFIX}_{name}", meaning, value=value)
        yield from self._drafting()
        yield from self._ahead()

    def _drafting(self) -> Iterator[Metric]:
        decision, reasons = self._engine.drafting.decision, self._engine.drafting.reasons
        for name, meaning, value in (
            ("adaptive_k", "1 where each step's K follows measured acceptance.", int(decision.adaptive)),
            ("step_num_speculative_tokens", "K of the newest step.", decision.num_speculative_tokens),
            (
                "expected_speedup_ratio",
                "Expected tokens per second of the best K above 0, over those of K = 0; adaptive K only.",
                decision.speedup,
            ),
        ):
            yield GaugeMetricFamily(f"{PREFIX}_{name}", meaning, value=value)
        seconds = GaugeMetricFamily(
            f"{PREFIX}_step_seconds",
            "Seconds that a step takes at the present batch size, per K; adaptive K only.",
            labels=["num_speculative_tokens"],
        )
        for k, each in enumerate(decision.seconds_per_step):
            seconds.add_metric([str(k)], each)
        yield seconds
        decisions = CounterMetricFamily(
            f"{PREFIX}_drafting_decisions",
            "Verifications, counted per request, by why they drafted as many tokens as they did.",
            labels=["reason"],
        )
        for reason in REASONS:
            decisions.add_metric([reason], reasons[reason])
        yield decisions

    def _ahead(self) -> Iterator[Metric]:
        counts = self._engine.ahead
        for name, meaning in (
            ("lookups", "Rows drafted for, behind steps that were drafted ahead of"),
            ("hits", "Rows whose drafts were prepared"),
            ("used_seconds", "Seconds of drafting ahead for steps with hits"),
            ("waited_seconds", "Seconds that these steps waited for it"),
            ("lost_workers", "Processes that drafted ahead and were lost"),
        ):
            value = 0 if counts is None else getattr(counts, name)
            told = f"{meaning}; with ssd and mirror."
            yield CounterMetricFamily(f"{PREFIX}_ahead_{name}", told, value=value)


class _TelemetryState(Collector):
    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def collect(self) -> Iterator[Metric]:
        state = self._telemetry.state
        for kind, counts in (("records", state.records), ("captures", state.captures)):
            for name, meaning, value in (
                ("sent", "that the sidecar has acknowledged", counts.sent),
                ("refused", "that the sidecar refused for good", counts.refused),
                ("dropped", "dropped before the sidecar acknowledged them", counts.dropped),
                ("failed_attempts", "batches that have to be sent again", counts.failed_attempts),
            ):
                yield CounterMetricFamily(
                    f"{PREFIX}_telemetry_{kind}_{name}", f"Telemetry {kind} {meaning}.", value=value
                )
        yield CounterMetricFamily(
            f"{PREFIX}_telemetry_records_spooled",
            "Telemetry records written to the spool on disk.",
            value=state.spooled_records,
        )
        yield GaugeMetricFamily(
            f"{PREFIX}_telemetry_waiting_records",
            "Records that the sidecar has not acknowledged yet.",
            value=state.waiting_records,
        )
        yield GaugeMetricFamily(
            f"{PREFIX}_telemetry_spool_bytes",
            "Bytes of records waiting in the spool.",
            value=state.spool_bytes,
        )

"""The built-in engine: latency, batch, cache, speculation, kernels, telemetry."""

from __future__ import annotations

from typing import Final

from dashboards import colours, frame, panels, promql, words
from dashboards.frame import Page, Row
from dashboards.panels import Panel
from dashboards.promql import chosen

P: Final = "driftguard_engine"
NO_ENGINE: Final = "Prometheus has no metrics of this engine"
NO_DRAFTS: Final = "Nothing was drafted"
SCRAPE: Final = f"{P}_running_requests"
DRAFT: Final = chosen("draft_version")
SPECULATING: Final = 'draft_version!="none"'
ENGINE: Final = ("instance",)
QUANTILES: Final = (0.5, 0.95, 0.99)


def page() -> Page:
    query = f"label_values({P}_draft_tokens_total{{{chosen('job')}, {chosen('instance')}}}, draft_version)"
    return Page(
        uid=frame.ENGINE,
        description="The built-in speculative engine: what it serves, how fast, and how good its draft is.",
        scrape=SCRAPE,
        choices=[frame.choice("draft_version", "Draft version", query, description="The draft versions.")],
        annotations=[_swaps()],
        rows=[
            Row("Now", _now(), NO_ENGINE),
            Row("Latency", _latency(), NO_ENGINE),
            Row("Throughput", _throughput(), NO_ENGINE),
            Row("Batch and cache", _batch(), NO_ENGINE),
            Row("Speculation", _speculation(), NO_DRAFTS),
            Row("Telemetry to the sidecar", _telemetry(), NO_ENGINE),
            Row("Process", panels.process(SCRAPE), NO_ENGINE),
        ],
    )


def _swaps() -> frame.Annotation:
    """A draft version that has just appeared: the draft was swapped."""
    serving, by = promql.series(f"{P}_info"), "max by (instance, draft_version)"
    return frame.annotation(
        "Draft swaps",
        f"{by} ({serving}) unless {by} ({serving} offset 2m)",
        colour=colours.GOOD,
        title="Draft {{draft_version}} in service",
        text="{{instance}}",
    )


def _now() -> list[Panel]:
    labels = {
        "instance": "Instance",
        "server": "Server",
        "target": "Target",
        "draft": "Draft",
        "draft_version": "Draft version",
        "method": "Method",
        "verify_backend": "Verification",
        "device": "Device",
        "dtype": "Precision",
    }
    serving = panels.rows_of(
        "What serves",
        "Target, draft in service, and the verify backend (cuda, or the reference on the CPU).",
        {"Up": promql.gauge(f"{P}_info", by=tuple(labels))},
        labels,
        sort_by="Server",
        labels_only=True,
        height=4,
    )
    return [
        serving,
        panels.number(
            "Running",
            "Requests in a slot, of all engines.",
            (f"sum({promql.series(f'{P}_running_requests')})", ""),
            unit="none",
            width=6,
        ),
        panels.number(
            "Waiting",
            "Requests queued for a slot, of all engines.",
            (f"sum({promql.series(f'{P}_waiting_requests')})", ""),
            unit="none",
            bad_above=100,
            width=6,
        ),
        panels.number(
            "K",
            "Draft tokens per step if a request does not set them.",
            (promql.gauge(f"{P}_num_speculative_tokens", by=ENGINE), "{{instance}}"),
            unit="none",
            width=6,
        ),
        panels.number(
            "Speculation",
            "Whether requests may speculate.",
            (promql.gauge(f"{P}_speculation_enabled", by=ENGINE), "{{instance}}"),
            unit="none",
            width=6,
        ).mappings(words.by_name(words.ENABLED)),
    ]


def _latency() -> list[Panel]:
    return [
        _times("Time to the first token", "time_to_first_token_seconds", "From arrival to the first token."),
        _times(
            "Time per output token",
            "time_per_output_token_seconds",
            "Mean of each request after its first token. Drift of the draft shows here.",
        ),
        _times("Time per request", "request_latency_seconds", "From arrival to the end of the request."),
    ]


def _times(title: str, name: str, description: str) -> Panel:
    histogram = f"{P}_{name}"
    return panels.lines(
        title,
        f"{description} Percentiles over requests, and the mean.",
        *((promql.quantile(q, histogram), f"p{100 * q:.0f}") for q in QUANTILES),
        (promql.ratio(f"{histogram}_sum", f"{histogram}_count"), "mean"),
        unit="s",
        words=words.QUANTILES,
        width=8,
    )


def _throughput() -> list[Panel]:
    def per_second(name: str, *by: str) -> str:
        return promql.summed_rate(f"{P}_{name}_total", by=by)

    return [
        panels.lines(
            "Tokens",
            "Prompt and output tokens per second of the requests that ended. Reused are prompt tokens "
            "that were in the KV cache from another request.",
            (per_second("prompt_tokens"), "prompt"),
            (per_second("reused_prompt_tokens"), "reused"),
            (per_second("output_tokens"), "output"),
            unit="short",
            width=8,
        ),
        panels.lines(
            "Requests",
            "Requests per second that ended, by reason: stop, length, abort, error.",
            (per_second("requests", "finish_reason"), "{{finish_reason}}"),
            unit="reqps",
            words=words.ENDINGS,
            width=8,
        ).no_value("No request has ended"),
        panels.lines(
            "Refused requests",
            "HTTP requests per second that were refused, by error code.",
            (per_second("refused_requests", "code"), "{{code}}"),
            unit="reqps",
            width=8,
        ).no_value("No request was refused"),
    ]


def _batch() -> list[Panel]:
    batch = panels.lines(
        "Batch",
        "Running and waiting requests, against the number of slots.",
        (promql.gauge(f"{P}_running_requests", by=ENGINE), "running {{instance}}"),
        (promql.gauge(f"{P}_waiting_requests", by=ENGINE), "waiting {{instance}}"),
        (promql.gauge(f"{P}_slots", by=ENGINE), "slots {{instance}}"),
        unit="none",
    )
    used = promql.gauge(f"{P}_cached_tokens", by=ENGINE)
    capacity = promql.gauge(f"{P}_cache_capacity_tokens", by=ENGINE)
    batch = panels.where_like(batch, "^running .*", panels.colour(colours.MAIN))
    batch = panels.where_like(batch, "^waiting .*", panels.colour(colours.WARNING))
    return [
        panels.where_like(batch, "^slots .*", panels.dashed(colours.NEUTRAL)),
        panels.lines(
            "Cache in use",
            "Tokens of the running requests, as a fraction of the room in all slots. A slot is as long as "
            "the longest allowed request, so this stays low with short ones.",
            (f"{used} / {capacity}", "{{instance}}"),
            unit="percentunit",
        )
        .min(0)
        .max(1),
    ]


def _speculation() -> list[Panel]:
    def counts(name: str) -> str:
        return f"{P}_{name}_total"

    by = ("draft_version",)
    drafted, steps = counts("draft_tokens"), counts("steps")
    verified = promql.summed_rate(steps, DRAFT, by=ENGINE)
    kernels = promql.gauge(f"{P}_info", by=(*ENGINE, "verify_backend"))
    return [
        panels.lines(
            "Acceptance rate",
            "Accepted fraction of draft tokens, per draft version.",
            (promql.ratio(counts("accepted_tokens"), drafted, DRAFT, by=by), "{{draft_version}}"),
            unit="percentunit",
        ),
        panels.lines(
            "Acceptance rate per position",
            "Of the steps that drafted a token at this position (from 0), the fraction in which it was "
            "accepted. Not conditional on the positions before.",
            (
                promql.ratio(
                    counts("position_accepted_tokens"),
                    counts("position_draft_tokens"),
                    DRAFT,
                    by=("position",),
                ),
                "position {{position}}",
            ),
            unit="percentunit",
        ),
        panels.lines(
            "Acceptance length",
            "Emitted tokens per verification of a request.",
            (promql.ratio(counts("emitted_tokens"), steps, DRAFT, SPECULATING, by=by), "{{draft_version}}"),
            unit="short",
            width=8,
        ),
        panels.lines(
            "Draft tokens per step",
            "Drafted per verification: K, less at the end of a request.",
            (promql.ratio(drafted, steps, DRAFT, SPECULATING, by=by), "{{draft_version}}"),
            unit="short",
            width=8,
        ),
        panels.lines(
            "Verifications",
            "Verifications per second, counted per request, by the kernels that do them.",
            (f"{verified} * on (instance) group_right () {kernels}", "{{verify_backend}} {{instance}}"),
            unit="ops",
            width=8,
        ),
        panels.lines(
            "Drafting decisions",
            "Verifications per second, counted per request, by the reason for the number of draft tokens: "
            "below_break_even and high_concurrency mean that speculation does not pay off now.",
            (promql.summed_rate(counts("drafting_decisions"), by=("reason",)), "{{reason}}"),
            unit="ops",
        ),
        panels.lines(
            "Fallbacks",
            "1 where the reference verifies, or steps are not captured or run ahead, on a device that the "
            "engine's own kernels are meant for: slower, and the log says why.",
            (promql.gauge(f"{P}_verify_fallback", by=ENGINE), "verification {{instance}}"),
            (promql.gauge(f"{P}_loop_fallback", by=ENGINE), "steps {{instance}}"),
            unit="none",
        ),
    ]


def _telemetry() -> list[Panel]:
    fates = ("sent", "refused", "dropped", "failed_attempts")
    return [
        panels.lines(
            "Records",
            "Records per second: acknowledged, refused, lost, and batches to be sent again.",
            *(
                (promql.summed_rate(f"{P}_telemetry_records_{fate}_total"), fate.replace("_", " "))
                for fate in fates
            ),
            (promql.summed_rate(f"{P}_telemetry_records_spooled_total"), "spooled to disk"),
            unit="cps",
            width=8,
        ),
        panels.lines(
            "Captured requests",
            "The same for requests that are captured for retraining.",
            *(
                (promql.summed_rate(f"{P}_telemetry_captures_{fate}_total"), fate.replace("_", " "))
                for fate in fates
            ),
            unit="cps",
            width=8,
        ),
        panels.lines(
            "Waiting records",
            "Records that wait in memory or on disk while the sidecar is unreachable.",
            (promql.gauge(f"{P}_telemetry_waiting_records", by=ENGINE), "{{instance}}"),
            unit="short",
            width=4,
        ),
        panels.lines(
            "Spool",
            "Bytes of records that wait on disk.",
            (promql.gauge(f"{P}_telemetry_spool_bytes", by=ENGINE), "{{instance}}"),
            unit="bytes",
            width=4,
        ),
    ]

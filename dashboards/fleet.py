"""Every stream's verdict, the worst first; open incidents; scraped servers; the sidecar's own health."""

from __future__ import annotations

from typing import Final

from dashboards import frame, panels, promql, streams, words
from dashboards.frame import Page, Row
from dashboards.panels import Panel
from dashboards.promql import any_of, is_

INCIDENT_PX: Final = 290  # of its id
SCRAPE: Final = "driftguard_fold_lag_records"
NO_SIDECAR: Final = "Prometheus has no metrics of a sidecar"
FAILING: Final = 'condition!~"reporting|idle|waiting"'


def page() -> Page:
    return Page(
        uid=frame.FLEET,
        description="Which streams of speculative decoding need attention, and whether DriftGuard works.",
        scrape=SCRAPE,
        annotations=[streams.change_points(), streams.promotions()],
        rows=[
            Row("Now", _now(), NO_SIDECAR),
            Row("Streams, the worst first", _streams(), "No record has arrived"),
            Row("Incidents", _incidents(), NO_SIDECAR),
            Row("Scraped servers", _sources(), "The sidecar scrapes no server"),
            Row("Sidecar: ingest", _ingest(), "No record has arrived"),
            Row("Sidecar: health", _health(), NO_SIDECAR),
        ],
    )


def _now() -> list[Panel]:
    def streams_with(*matchers: str) -> str:
        return promql.total("driftguard_streams", *matchers, of=("verdict",))

    failing = promql.total("driftguard_source_condition", FAILING, of=("source", "kind", "condition"))
    return [
        panels.number(
            "Streams in service",
            "Streams (server, target, draft version, method) that no newer draft has replaced.",
            (streams_with('verdict!="replaced"'), ""),
            unit="none",
        ),
        panels.number(
            "Degraded streams",
            "Streams with an open incident: their acceptance fell and has not recovered.",
            (streams_with(is_("verdict", "degraded")), ""),
            unit="none",
            bad_above=1,
        ),
        panels.number(
            "Open incidents",
            "Incidents that are not resolved. Information pages nobody: a rise, or a fall that costs little.",
            (_open_by_severity(), "{{severity}}"),
            unit="none",
            width=6,
            words=words.SEVERITIES,
        ),
        panels.number(
            "Servers that fail",
            "Scraped servers whose metrics cannot be read, are incomplete, or show no drafting.",
            (f"{failing} or vector(0)", ""),
            unit="none",
            bad_above=1,
        ),
        panels.number(
            "Records behind",
            "Stored records that the detector has not folded yet.",
            (promql.gauge("driftguard_fold_lag_records"), ""),
            unit="short",
            bad_above=10_000,
            width=3,
        ),
        panels.number(
            "Undelivered",
            "Notifications that are not delivered yet.",
            (promql.total("driftguard_notifications_undelivered"), ""),
            unit="none",
            bad_above=1,
            width=3,
        ),
    ]


def _open_by_severity() -> str:
    return promql.total("driftguard_incidents_open", of=("direction",), by=("severity",))


def _streams() -> list[Panel]:
    since, emitted = "driftguard_stream_verdict_since_timestamp_seconds", "driftguard_emitted_tokens_total"
    traffic = (streams.SPECULATING, streams.TRAFFIC)
    table = panels.rows_of(
        "Every stream, the worst first",
        "The verdict of each stream, since when it holds, acceptance now and at baseline (in the current mix "
        "of segments), and the cost of a fall. A row opens the stream.",
        {
            "Verdict": streams.verdicts(),
            "For": promql.age(promql.gauge(since, streams.SPECULATING, by=streams.LABELS)),
            "Acceptance": streams.acceptance(),
            "Baseline": streams.baseline(),
            "Slower": promql.gauge(
                "driftguard_incident_slowdown_ratio", any_of("direction", "down", "slower"), by=streams.LABELS
            ),
            "Emitted tokens/s": promql.summed_rate(emitted, *traffic, by=streams.LABELS),
        },
        streams.HEADINGS,
        sort_by="Verdict",
        leading="Verdict",
        height=9,
    )
    for column, unit in (
        ("For", "s"),
        ("Acceptance", "percentunit"),
        ("Baseline", "percentunit"),
        ("Slower", "percentunit"),
        ("Emitted tokens/s", "short"),
    ):
        table = panels.where(table, column, {"unit": unit})
    table = panels.where(table, "Verdict", panels.filled(words.by_rank(words.VERDICTS)))
    table = panels.where(table, "Server", streams.link())
    return [
        table,
        panels.states(
            "Verdicts over time",
            f"Of the {promql.SHOWN} streams with the worst verdicts at the end of the time shown.",
            (streams.of_the_worst(streams.verdicts()), streams.NAME),
            mappings=words.by_rank(words.VERDICTS),
            width=16,
            height=11,
        ),
        panels.lines(
            "Streams by verdict",
            "How many streams have each verdict.",
            (promql.total("driftguard_streams", by=("verdict",)), "{{verdict}}"),
            unit="none",
            words=words.VERDICTS,
            width=8,
            height=11,
        ),
        panels.lines(
            "Acceptance rate",
            f"Accepted fraction of draft tokens, of the {promql.SHOWN} streams with the worst verdicts. "
            "Canary probes are left out here and in all panels that do not name them.",
            (streams.of_the_worst(streams.acceptance()), streams.NAME),
            unit="percentunit",
        ),
        panels.lines(
            "Emitted tokens",
            "Tokens per second that users receive from verifications, of the same streams.",
            (streams.of_the_worst(promql.summed_rate(emitted, *traffic, by=streams.LABELS)), streams.NAME),
            unit="short",
        ),
    ]


def _incidents() -> list[Panel]:
    by = ("destination", "event", "outcome")
    attempts = promql.summed_rate("driftguard_notifications_total", by=by)
    return [
        _open_incidents(),
        panels.lines(
            "Open incidents over time",
            "Incidents that are not resolved, by severity.",
            (_open_by_severity(), "{{severity}}"),
            unit="none",
            width=8,
            words=words.SEVERITIES,
        ),
        panels.lines(
            "Attempts to notify",
            "Attempts per second to deliver a notification, by destination and outcome.",
            (f"{attempts} > 0", "{{destination}} {{event}}: {{outcome}}"),
            unit="cps",
            width=8,
        ).no_value("Nothing was to be told"),
        panels.lines(
            "Undelivered notifications",
            "Notifications that are not delivered yet.",
            (promql.total("driftguard_notifications_undelivered"), "undelivered"),
            unit="none",
            width=8,
        ),
    ]


def _open_incidents() -> Panel:
    told = ("incident", "cause", "confidence")
    known = promql.gauge("driftguard_incident_info", by=(*streams.INCIDENT, *told))
    joined = f"* on ({', '.join(streams.INCIDENT)}) group_right () {known}"
    since = promql.gauge("driftguard_incident_change_point_timestamp_seconds", by=streams.INCIDENT)
    slowdown = promql.gauge("driftguard_incident_slowdown_ratio", by=streams.INCIDENT)
    table = panels.rows_of(
        "Open incidents",
        "Every incident that is not resolved: time since its change point, cost, likely cause "
        "and confidence. The last column opens it on the status page.",
        {"For": f"(time() - {since}) {joined}", "Slower": f"{slowdown} {joined}"},
        {
            "severity": "Severity",
            "direction": "Change",
            **streams.HEADINGS,
            "cause": "Likely cause",
            "confidence": "Confidence",
            "incident": "Incident",
        },
        sort_by="For",
        descending=True,
        height=7,
    )
    table = panels.where(table, "For", {"unit": "s"})
    table = panels.where(table, "Slower", {"unit": "percentunit"})
    table = panels.where(table, "Severity", panels.filled(words.by_name(words.SEVERITIES)))
    table = panels.where(table, "Likely cause", {"mappings": words.by_name(words.CAUSES)})
    page = "${sidecar:raw}/incidents/${__data.fields.incident}"
    opening = {**panels.link("Open on the status page", page), "custom.width": INCIDENT_PX}
    return panels.where(table, "Incident", opening).no_value("No incident is open")


def _sources() -> list[Panel]:
    by = ("source", "kind")
    last = promql.gauge("driftguard_source_last_success_timestamp_seconds", by=by)
    return [
        panels.states(
            "Condition of the scraped servers",
            f"After each scrape, of the {promql.SHOWN} servers in the worst condition at the end of the time "
            "shown.",
            (
                promql.largest(streams.conditions(), of=f"-1 * {streams.conditions()}", by=by),
                "{{source}} ({{kind}})",
            ),
            mappings=words.by_rank(words.CONDITIONS),
            height=7,
        ),
        panels.lines(
            "Time since the last good scrape",
            f"How long metrics have not been read, of the {promql.SHOWN} servers that have waited longest. "
            "It grows while a server is unreachable.",
            (promql.largest(promql.age(last)), "{{source}} ({{kind}})"),
            unit="s",
        ),
        panels.lines(
            "Scrapes",
            "Scrapes per second of all servers, by outcome.",
            (promql.summed_rate("driftguard_source_scrapes_total", by=("condition",)), "{{condition}}"),
            unit="cps",
            words=words.CONDITIONS,
        ),
    ]


def _ingest() -> list[Panel]:
    commit = "driftguard_ingest_commit_seconds"
    return [
        panels.lines(
            "Records in",
            "Records per second that arrived over HTTP, by outcome.",
            (promql.summed_rate("driftguard_ingest_records_total", by=("outcome",)), "{{outcome}}"),
            unit="cps",
            words=words.ARRIVALS,
            width=8,
        ),
        panels.lines(
            "Time to commit",
            "From the arrival of a batch to its commit.",
            *((promql.quantile(q, commit), f"p{100 * q:.0f}") for q in (0.5, 0.95, 0.99)),
            unit="s",
            words=words.QUANTILES,
            width=8,
        ),
        panels.lines(
            "Records waiting",
            "Queued: they wait for the database. Behind: stored, they wait for the detector.",
            (promql.gauge("driftguard_ingest_queued_records", by=("instance",)), "{{instance}} queued"),
            (promql.gauge("driftguard_fold_lag_records"), "behind"),
            unit="short",
            width=8,
        ),
    ]


def _health() -> list[Panel]:
    # 0 until a process has set its gauges for the first time
    refreshed = promql.gauge("driftguard_gauges_last_refresh_timestamp_seconds", by=("instance",))
    failures = (
        ("driftguard_fold_failures_total", "batches rolled back"),
        ("driftguard_detector_states_lost_total", "detector states damaged"),
        ("driftguard_detector_states_of_other_version_total", "detector states of another version"),
    )
    return [
        panels.states(
            "Database",
            "Whether the last use of the database worked, per process.",
            (promql.gauge("driftguard_database_up", by=("instance",)), "{{instance}}"),
            mappings=words.by_name(words.REACHABLE),
            width=12,
        ),
        panels.lines(
            "Failures",
            "Per second: batches whose fold failed and was rolled back, and detector states that were lost.",
            *((promql.summed_rate(name), text) for name, text in failures),
            unit="cps",
        ),
        panels.lines(
            "Time since the gauges were set",
            "The gauges of streams, incidents and retrainings are set every few seconds.",
            (promql.age(f"({refreshed} > 0)"), "{{instance}}"),
            unit="s",
        ),
        panels.lines(
            "Failures of chores",
            "Per second: failures of the recurring tasks beside the detector.",
            (promql.summed_rate("driftguard_chore_failures_total", by=("chore",)), "{{chore}}"),
            unit="cps",
        ),
        *panels.process(SCRAPE),
    ]

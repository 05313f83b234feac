"""One server and target: acceptance against its baseline, where it changed, and what that costs."""

from __future__ import annotations

from typing import Final

from dashboards import colours, frame, panels, promql, streams, words
from dashboards.frame import Page, Row
from dashboards.panels import Panel
from dashboards.promql import any_of, chosen, is_

PLACE: Final = (is_("server", "$server"), is_("target", "$target"))
CHOSEN: Final = (*PLACE, chosen("draft_version"), chosen("method"))
SEGMENTS: Final = (*CHOSEN, chosen("segment"))
TRAFFIC: Final = (*SEGMENTS, streams.TRAFFIC)
DRAFT: Final = ("draft_version", "method")
NAME: Final = "{{draft_version}} {{method}}"
NO_RECORDS: Final = "No record of this server and target"
DRAFTED: Final = "driftguard_draft_tokens_total"
ACCEPTED: Final = "driftguard_accepted_tokens_total"
DRAFTED_AT: Final = "driftguard_draft_tokens_per_position_total"
ACCEPTED_AT: Final = "driftguard_accepted_tokens_per_position_total"
EMITTED: Final = "driftguard_emitted_tokens_total"
STEPS: Final = "driftguard_steps_total"
RECORDS: Final = "driftguard_records_total"


def page() -> Page:
    return Page(
        uid=frame.STREAM,
        description="One server and target: acceptance per draft version and segment against the baseline, "
        "and what a change costs.",
        scrape="driftguard_fold_lag_records",
        choices=_choices(),
        kept={frame.RETRAINING: ("server", "target")},
        annotations=[
            streams.change_points(*CHOSEN),
            streams.promotions(*PLACE),
            streams.incidents(*CHOSEN),
        ],
        rows=[
            Row("Now", _now(), NO_RECORDS),
            Row("Acceptance", _acceptance(), NO_RECORDS),
            Row("Where: segments", _segments(), NO_RECORDS),
            Row("Tokens", _tokens(), NO_RECORDS),
            Row("Speed and cost", _cost(), "No request told its speed"),
            Row("The server", _server(), NO_RECORDS),
        ],
    )


def _choices() -> list[frame.Variable]:
    records, base = "driftguard_stream_verdict", f"{chosen('job')}, {chosen('instance')}"
    place = ", ".join(PLACE)
    found: list[frame.Variable] = [
        frame.choice(
            "server",
            "Server",
            f"label_values({records}{{{base}}}, server)",
            description="The serving engine.",
            several=False,
        ),
        frame.choice(
            "target",
            "Target",
            f"label_values({records}{{{base}, {PLACE[0]}}}, target)",
            description="The large model, which decides every token.",
            several=False,
        ),
    ]
    for name, label, metric, text in (
        ("draft_version", "Draft version", records, "The draft versions."),
        ("method", "Method", records, "The drafting method."),
        ("segment", "Segment", RECORDS, "Bounded labels of the traffic."),
    ):
        query = f"label_values({metric}{{{base}, {place}}}, {name})"
        found.append(frame.choice(name, label, query, description=text))
    return found


def _now() -> list[Panel]:
    speed = "driftguard_stream_tokens_per_second"
    slowdown = promql.gauge(
        "driftguard_incident_slowdown_ratio", any_of("direction", "down", "slower"), *CHOSEN, by=DRAFT
    )
    return [
        panels.states(
            "Verdict",
            "The verdict of each draft version's stream over time.",
            (streams.verdicts(*CHOSEN), NAME),
            mappings=words.by_rank(words.VERDICTS),
            width=12,
            height=6,
        ),
        panels.number(
            "Acceptance",
            "Accepted fraction of draft tokens now.",
            (streams.acceptance(*SEGMENTS, by=DRAFT), NAME),
            unit="percentunit",
            width=3,
            height=6,
        ).no_value("no drafts"),
        panels.number(
            "Baseline",
            "Acceptance at baseline, in the current mix of segments.",
            (streams.baseline(*SEGMENTS, by=DRAFT), NAME),
            unit="percentunit",
            colour=colours.NEUTRAL,
            width=3,
            height=6,
        ).no_value("none yet"),
        panels.number(
            "Tokens/s",
            "Decoding speed of one request over the last five minutes.",
            (promql.gauge(speed, is_("period", "now"), streams.SPECULATING, *CHOSEN, by=DRAFT), NAME),
            unit="short",
            width=3,
            height=6,
        ).no_value("not told"),
        panels.number(
            "Slower",
            "Fraction of the tokens per second that the open incident costs.",
            (slowdown, NAME),
            unit="percentunit",
            bad_above=0.2,
            width=3,
            height=6,
        ).no_value("no incident"),
    ]


def _acceptance() -> list[Panel]:
    against = panels.lines(
        "Acceptance rate against the baseline",
        "Accepted fraction of draft tokens, per draft version. Dashed: the baseline in the current mix of "
        "segments, so that a change of the mix does not look like a change; in grey, the break-even.",
        (streams.acceptance(*SEGMENTS, by=DRAFT), NAME),
        (streams.baseline(*SEGMENTS, by=DRAFT), f"baseline {NAME}"),
        (
            promql.gauge("driftguard_stream_break_even_acceptance_ratio", *CHOSEN, by=DRAFT),
            f"break-even {NAME}",
        ),
        unit="percentunit",
        width=24,
        height=10,
    )
    against = panels.where_like(against, "^baseline .*", panels.dashed(colours.MAIN))
    against = panels.where_like(against, "^break-even .*", panels.dashed(colours.NEUTRAL))
    return [
        against,
        panels.lines(
            "Acceptance length",
            "Emitted tokens per verification: 1 if no draft token is accepted, at most K + 1.",
            (promql.ratio(EMITTED, STEPS, *TRAFFIC, streams.SPECULATING, by=DRAFT), NAME),
            unit="short",
        ),
        panels.lines(
            "Draft tokens per step",
            "Drafted tokens per verification: K, if every step drafts K.",
            (promql.ratio(DRAFTED, STEPS, *TRAFFIC, streams.SPECULATING, by=DRAFT), NAME),
            unit="short",
        ),
        panels.lines(
            "Acceptance rate per position",
            "Accepted fraction of the tokens at each position of a draft, of all segments together.",
            (
                promql.ratio(ACCEPTED_AT, DRAFTED_AT, *CHOSEN, streams.TRAFFIC, by=(*DRAFT, "position")),
                f"position {{{{position}}}} {NAME}",
            ),
            unit="percentunit",
            width=24,
        ).no_value("The records tell no positions"),
    ]


def _segments() -> list[Panel]:
    by, name = (*DRAFT, "segment"), "{{segment}} {{draft_version}}"
    acceptance = streams.acceptance(*SEGMENTS, by=by)
    baseline = promql.gauge("driftguard_acceptance_baseline_ratio", *SEGMENTS, by=by)
    drafted = promql.summed_rate(DRAFTED, *TRAFFIC, by=("segment",))
    return [
        panels.lines(
            "Acceptance rate per segment",
            "Accepted fraction of the draft tokens of each segment.",
            (acceptance, name),
            unit="percentunit",
        ),
        panels.lines(
            "Difference to the baseline",
            "Acceptance rate now minus that of the segment's baseline. Only segments with a baseline of all "
            "draft positions.",
            (f"{acceptance} - {baseline}", name),
            unit="percentunit",
        ).no_value("No segment has a baseline yet"),
        panels.lines(
            "Baselines",
            "The baseline of each segment. A step means that the baseline was learned anew.",
            (baseline, name),
            unit="percentunit",
        ).no_value("No segment has a baseline yet"),
        panels.shares(
            "Mix of segments",
            "Each segment's fraction of the draft tokens.",
            drafted,
            promql.summed_rate(DRAFTED, *TRAFFIC),
            "{{segment}}",
        ),
        _named_by_incidents(),
    ]


def _named_by_incidents() -> Panel:
    by = (*DRAFT, "direction", "severity", "segment", "positions")
    table = panels.rows_of(
        "Segments that an open incident names",
        "The acceptance rate before and after the change point, when the incident opened. "
        "If K varies, it is that of the first draft position.",
        {
            "Before": promql.gauge("driftguard_incident_acceptance_before_ratio", *SEGMENTS, by=by),
            "After": promql.gauge("driftguard_incident_acceptance_after_ratio", *SEGMENTS, by=by),
        },
        {
            "segment": "Segment",
            "draft_version": "Draft version",
            "method": "Method",
            "direction": "Change",
            "severity": "Severity",
            "positions": "Draft positions",
        },
        sort_by="After",
        height=6,
    )
    for column in ("Before", "After"):
        table = panels.where(table, column, {"unit": "percentunit"})
    table = panels.where(table, "Severity", panels.filled(words.by_name(words.SEVERITIES)))
    return table.no_value("No incident of acceptance is open")


def _tokens() -> list[Panel]:
    tokens = panels.lines(
        "Drafted, accepted and emitted tokens",
        "Tokens per second: offered by the draft, kept by the target, received by users (accepted tokens "
        "and one bonus token per step).",
        (promql.summed_rate(DRAFTED, *TRAFFIC), "drafted"),
        (promql.summed_rate(ACCEPTED, *TRAFFIC), "accepted"),
        (promql.summed_rate(EMITTED, *TRAFFIC), "emitted"),
        unit="short",
    )
    for name, colour in (
        ("drafted", colours.NEUTRAL),
        ("accepted", colours.MAIN),
        ("emitted", colours.GOOD),
    ):
        tokens = panels.where(tokens, name, panels.colour(colour))
    return [
        tokens,
        panels.lines(
            "Records",
            "Records per second that the detector folded, by kind: requests, scrape windows, canary probes.",
            (promql.summed_rate(RECORDS, *SEGMENTS, by=("kind",)), "{{kind}}"),
            unit="cps",
        ),
    ]


def _cost() -> list[Panel]:
    speed = "driftguard_stream_tokens_per_second"
    speeds = panels.lines(
        "Tokens/s of a request",
        "Decoding speed of one request, 1 / mean time per output token. Dashed: before the open incident, or "
        "in the two hours before.",
        (promql.gauge(speed, is_("period", "now"), *CHOSEN, by=DRAFT), NAME),
        (promql.gauge(speed, is_("period", "before"), *CHOSEN, by=DRAFT), f"before {NAME}"),
        unit="short",
    )
    speeds = panels.where(speeds, "none none", streams.UNSPECULATED)
    speeds = panels.where(speeds, "before none none", {"displayName": "before, without speculation"})
    slowdown = "driftguard_incident_slowdown_ratio"
    faster = "driftguard_speculation_speedup_ratio"
    by_load = "driftguard_speculation_speedup_by_load_ratio"
    best = panels.lines(
        "K in use and the best K",
        "Draft tokens per step as configured, and the fastest K at the current acceptance; 0 is "
        "without speculation.",
        (
            promql.gauge("driftguard_stream_num_speculative_tokens", streams.SPECULATING, *CHOSEN, by=DRAFT),
            NAME,
        ),
        (promql.gauge("driftguard_stream_best_num_speculative_tokens", *CHOSEN, by=DRAFT), f"best {NAME}"),
        unit="none",
    )
    return [
        panels.where_like(speeds, "^before .*", panels.dashed(colours.NEUTRAL)),
        panels.lines(
            "Cost of incidents",
            "Fraction of the tokens per second lost: measured if that is precise enough, else by formula.",
            (promql.gauge(slowdown, *CHOSEN, by=(*DRAFT, "direction")), f"{NAME} {{{{direction}}}}"),
            unit="percentunit",
        ).no_value("No incident with a known cost"),
        panels.lines(
            "Gain of speculation",
            "Tokens per second as a multiple of those without speculation, with a 95% interval: at the "
            "current load, and the estimate at each load at which both were timed.",
            (promql.gauge(faster, *CHOSEN, by=(*DRAFT, "bound")), f"{NAME} {{{{bound}}}}"),
            (
                promql.gauge(by_load, is_("bound", "estimate"), *CHOSEN, by=(*DRAFT, "concurrency")),
                f"{NAME} {{{{concurrency}}}} at once",
            ),
            unit="none",
        ).no_value("Not known: too few timed requests without speculation"),
        panels.where_like(best, "^best .*", panels.dashed(colours.GOOD)),
    ]


def _server() -> list[Panel]:
    source = is_("source", "$server")
    last = promql.gauge("driftguard_source_last_success_timestamp_seconds", source, by=("source", "kind"))
    since = promql.gauge("driftguard_draft_in_service_since_timestamp_seconds", *PLACE, by=("draft_version",))
    arrival = promql.gauge("driftguard_stream_last_arrival_timestamp_seconds", *CHOSEN, by=DRAFT)
    arrived = panels.lines(
        "Time since the last record",
        "How long ago the newest record of each stream arrived, canary probes left out.",
        (promql.age(arrival), NAME),
        unit="s",
    )
    return [
        panels.states(
            "Condition at the newest scrape",
            "The condition of the server after its newest scrape.",
            (streams.conditions(source), "{{source}} ({{kind}})"),
            mappings=words.by_rank(words.CONDITIONS),
            width=12,
        ).no_value("This server is not scraped"),
        panels.lines(
            "Time since the last good scrape",
            "How long the server's metrics have not been read.",
            (promql.age(last), "{{source}} ({{kind}})"),
            unit="s",
        ).no_value("This server is not scraped"),
        panels.where(arrived, "none none", streams.UNSPECULATED),
        panels.lines(
            "Age of the draft in service",
            "Time since the draft was put into service.",
            (promql.age(since), "{{draft_version}}"),
            unit="s",
        ).no_value("Nobody told when it was put into service"),
        panels.lines(
            "Answered and not recorded",
            "Part of the server's answered requests of the last 24 hours of which there is no record, by "
            "reason.",
            (
                promql.gauge(
                    "driftguard_unrecorded_requests_ratio", is_("server", "$server"), by=("reason",)
                ),
                "{{reason}}",
            ),
            unit="percentunit",
            width=24,
        ).no_value("No answer is known to be without a record"),
    ]

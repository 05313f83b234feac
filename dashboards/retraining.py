"""Retraining: runs and how they ended, the gate, candidates, promotions and rollbacks."""

from __future__ import annotations

from typing import Final

from dashboards import colours, frame, panels, promql, streams, words
from dashboards.frame import Page, Row
from dashboards.panels import Panel
from dashboards.promql import chosen, is_

PLACE: Final = ("server", "target")
CHOSEN: Final = (chosen("server"), chosen("target"))
NAME: Final = "{{server}} {{target}}"


def page() -> Page:
    base = f"{chosen('job')}, {chosen('instance')}"
    verdict = "driftguard_stream_verdict"
    return Page(
        uid=frame.RETRAINING,
        description="Whether drafts are retrained when necessary: runs, the gate, promotions, rollbacks.",
        scrape="driftguard_fold_lag_records",
        choices=[
            frame.choice(
                "server",
                "Server",
                f"label_values({verdict}{{{base}}}, server)",
                description="The serving engines.",
            ),
            frame.choice(
                "target",
                "Target",
                f"label_values({verdict}{{{base}, {CHOSEN[0]}}}, target)",
                description="The large models, which decide every token.",
            ),
        ],
        annotations=[streams.promotions(*CHOSEN), streams.change_points(*CHOSEN)],
        rows=[
            Row("Now", _now(), "No draft was retrained"),
            Row("Runs", _runs(), "No draft was retrained"),
            Row("The gate", _gate(), "The gate has judged no candidate"),
            Row("Drafts", _drafts(), "No draft is known"),
            Row("Training traffic", _captures(), "No request was captured (capture.enabled)"),
        ],
    )


def _now() -> list[Panel]:
    last = promql.gauge("driftguard_retrain_last_success_timestamp_seconds", *CHOSEN, by=PLACE)
    outcomes = words.names(words.OUTCOMES)
    outcome = promql.ranked("driftguard_retrain_last_run_outcome", "outcome", outcomes, *CHOSEN, by=PLACE)
    watching = promql.gauge("driftguard_retrain_stage", *CHOSEN, is_("stage", "watching"), by=PLACE)
    newest = f"{outcome} or {len(words.NEWEST_RUN)} * ({watching} == 1)"
    table = panels.rows_of(
        "Servers",
        "How the newest run ended (a promoted draft is watched first), how long ago one last succeeded "
        "(promoted, or nothing to do), and how many candidates in a row the gate has rejected.",
        {
            "Newest run": newest,
            "Since a success": promql.age(last),
            "Rejected in a row": promql.gauge("driftguard_retrain_rejected_in_a_row", *CHOSEN, by=PLACE),
        },
        {"server": "Server", "target": "Target"},
        sort_by="Since a success",
        leading="Newest run",
        descending=True,
        width=16,
        height=6,
    )
    table = panels.where(table, "Newest run", panels.filled(words.by_rank(words.NEWEST_RUN)))
    table = panels.where(table, "Since a success", {"unit": "s"})
    table = panels.where(table, "Server", streams.link())
    return [
        table,
        panels.number(
            "Finished promotions",
            "Runs in the time range shown that ended with a new draft in service, after it was watched. "
            "Those that are still watched are not counted.",
            (_ended(is_("outcome", "promoted")), "{{outcome}}"),
            unit="none",
            height=6,
        )
        .decimals(0)
        .no_value("none"),
        panels.number(
            "Rollbacks",
            "Promoted drafts in the time range shown that did worse on live traffic and were rolled back.",
            (_ended(is_("outcome", "rolled_back")), "{{outcome}}"),
            unit="none",
            bad_above=1,
            height=6,
        )
        .decimals(0)
        .no_value("none"),
    ]


def _ended(*matchers: str) -> str:
    """Runs that ended in the time range shown, by outcome."""
    by = (*PLACE, "outcome")
    rose = promql.rise("driftguard_retrain_runs_total", promql.WHOLE, *CHOSEN, *matchers, by=by)
    return f"sum by (outcome) ({rose})"


def _runs() -> list[Panel]:
    stages = promql.ranked("driftguard_retrain_stage", "stage", words.names(words.STAGES), *CHOSEN, by=PLACE)
    ended = promql.risen("driftguard_retrain_runs_total", *CHOSEN, by=(*PLACE, "outcome"))
    return [
        panels.states(
            "Current run",
            "The stage of the current run, per server and target.",
            (stages, NAME),
            mappings=words.by_rank(words.STAGES),
            height=6,
        ).no_value("No run goes on"),
        panels.bars(
            "Ended runs",
            "Ended runs, by outcome.",
            (f"sum by (outcome) ({ended})", "{{outcome}}"),
            unit="none",
            words=words.OUTCOMES,
        ),
        panels.lines(
            "Time since a success",
            "Since a run last succeeded: promoted, or nothing to do. With the nightly job, this "
            f"should hardly exceed a day. Of the {promql.SHOWN} that have waited longest.",
            (
                promql.largest(
                    promql.age(
                        promql.gauge("driftguard_retrain_last_success_timestamp_seconds", *CHOSEN, by=PLACE)
                    )
                ),
                NAME,
            ),
            unit="s",
        ),
    ]


def _gate() -> list[Panel]:
    drafts = panels.lines(
        "Candidate against the draft in service",
        "Acceptance of both on the same held-out requests of the changed traffic, at the last decision.",
        (
            promql.gauge("driftguard_gate_acceptance_ratio", *CHOSEN, by=(*PLACE, "draft")),
            f"{{{{draft}}}} {NAME}",
        ),
        unit="percentunit",
    )
    return [
        panels.states(
            "Decision",
            "The gate's decision on the last candidate, per server and target.",
            (promql.gauge("driftguard_gate_passed", *CHOSEN, by=PLACE), NAME),
            mappings=words.by_name(words.PASSED),
            height=5,
        ),
        panels.where_like(drafts, "^in_service .*", panels.dashed(colours.NEUTRAL)),
        panels.lines(
            "Deciding bounds",
            "95% bounds, in single draft tokens kept: the least that the candidate gains on the changed "
            "traffic, and the most that it loses in any group of the traffic.",
            (promql.gauge("driftguard_gate_gain_lower_ratio", *CHOSEN, by=PLACE), f"gains at least {NAME}"),
            (promql.gauge("driftguard_gate_loss_upper_ratio", *CHOSEN, by=PLACE), f"loses at most {NAME}"),
            unit="percentunit",
        ),
    ]


def _drafts() -> list[Panel]:
    known = panels.lines(
        "Known drafts",
        "Drafts by state: candidates, rejected by the gate, in service, retired, rolled back.",
        (promql.total("driftguard_drafts", *CHOSEN, of=PLACE, by=("state",)), "{{state}}"),
        unit="none",
        words=words.DRAFT_STATES,
    )
    since = promql.gauge(
        "driftguard_draft_in_service_since_timestamp_seconds", *CHOSEN, by=(*PLACE, "draft_version")
    )
    table = panels.rows_of(
        "Drafts in service",
        "The draft in service of each server, and for how long.",
        {"For": promql.age(since)},
        {"server": "Server", "target": "Target", "draft_version": "Draft version"},
        sort_by="For",
        width=12,
    )
    return [known, panels.where(table, "For", {"unit": "s"})]


def _captures() -> list[Panel]:
    return [
        panels.lines(
            "Captured requests",
            "Captured requests per second, by outcome.",
            (promql.summed_rate("driftguard_captures_total", by=("outcome",)), "{{outcome}}"),
            unit="cps",
            words=words.ARRIVALS,
            width=24,
            height=6,
        ),
    ]

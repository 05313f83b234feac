"""States in words and colours. Ranks count from 1, the worst first, so that a table can be sorted by
urgency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from grafana_foundation_sdk.models import dashboard as models

from dashboards import colours

Words = Mapping[str, tuple[str, str]]  # state -> (word, colour), the worst first

VERDICTS: Final[Words] = {
    "degraded": ("Degraded", colours.BAD),
    "cannot_be_judged": ("Cannot be judged", colours.WARNING),
    "stale": ("Stale", colours.SILENT),
    "drafting_stopped": ("Drafting stopped", colours.WARNING),
    "speculation_loses": ("Speculation loses", colours.BAD),
    "improved": ("Improved", colours.BETTER),
    "watching": ("Watching", colours.LEARNING),
    "relearning": ("Relearning", colours.LEARNING),
    "insufficient_data": ("Insufficient data", colours.NEUTRAL),
    "steady": ("Steady", colours.GOOD),
    "replaced": ("Replaced", colours.GONE),
}

CONDITIONS: Final[Words] = {
    "unreachable": ("Unreachable", colours.BAD),
    "unreadable": ("Unreadable", colours.BAD),
    "stale": ("Stale", colours.SILENT),
    "metrics_hidden": ("Metrics hidden", colours.WARNING),
    "incomplete": ("Incomplete", colours.WARNING),
    "stalled": ("Stalled", colours.WARNING),
    "drafting_stopped": ("Drafting stopped", colours.WARNING),
    "not_speculating": ("Not speculating", colours.SILENT),
    "waiting": ("Waiting", colours.LEARNING),
    "idle": ("Idle", colours.NEUTRAL),
    "reporting": ("Reporting", colours.GOOD),
}

SEVERITIES: Final[Words] = {
    "critical": ("Critical", colours.BAD),
    "warning": ("Warning", colours.WARNING),
    "info": ("Information", colours.BETTER),
}

CAUSES: Final[Words] = {
    "query_drift": ("Traffic moved", colours.NEUTRAL),
    "mix_shift": ("Only the mix moved", colours.NEUTRAL),
    "machine": ("Machine", colours.NEUTRAL),
    "engine_state": ("Engine's state decays", colours.NEUTRAL),
    "cache": ("Prefix cache or length", colours.NEUTRAL),
    "draft_wrong": ("Wrong draft loaded", colours.NEUTRAL),
    "template": ("Prompt template", colours.NEUTRAL),
    "load": ("Load only", colours.NEUTRAL),
    "configuration": ("Configuration", colours.NEUTRAL),
    "target_replaced": ("Target replaced", colours.NEUTRAL),
    "quality": ("Looping or garbled output", colours.NEUTRAL),
    "unknown": ("Not known", colours.NEUTRAL),
}

STAGES: Final[Words] = {
    "collecting": ("Collecting traffic", colours.NEUTRAL),
    "training": ("Training", colours.LEARNING),
    "evaluating": ("Evaluating", colours.BETTER),
    "promoting": ("Promoting", colours.WARNING),
    "rolling_out": ("Restarting with the new draft", colours.WARNING),
    "watching": ("Watching the new draft", colours.MAIN),
    "rolling_back": ("Restarting with the old draft", colours.BAD),
}

OUTCOMES: Final[Words] = {
    "failed": ("Failed", colours.BAD),
    "rolled_back": ("Rolled back", colours.WARNING),
    "rejected": ("Rejected by the gate", colours.SILENT),
    "nothing_to_do": ("Nothing to do", colours.NEUTRAL),
    "promoted": ("Promoted", colours.GOOD),
}

NEWEST_RUN: Final[Words] = {**OUTCOMES, "watching": ("Draft being watched", colours.MAIN)}

DRAFT_STATES: Final[Words] = {
    "in_service": ("In service", colours.GOOD),
    "candidate": ("Candidate", colours.BETTER),
    "rejected": ("Rejected", colours.SILENT),
    "rolled_back": ("Rolled back", colours.WARNING),
    "lost": ("Lost by its engine", colours.BAD),
    "retired": ("Retired", colours.GONE),
}

ARRIVALS: Final[Words] = {
    "accepted": ("Accepted", colours.GOOD),
    "duplicate": ("Duplicate", colours.NEUTRAL),
    "refused": ("Refused", colours.BAD),
    "rejected_queue_full": ("Rejected, queue full", colours.WARNING),
}

ENDINGS: Final[Words] = {
    "stop": ("Stop", colours.GOOD),
    "length": ("Length", colours.MAIN),
    "abort": ("Aborted", colours.NEUTRAL),
    "error": ("Error", colours.BAD),
}

QUANTILES: Final[Words] = {
    "p50": ("p50", colours.MAIN),
    "p95": ("p95", colours.WARNING),
    "p99": ("p99", colours.BAD),
    "mean": ("Mean", colours.NEUTRAL),
}

REACHABLE: Final[Words] = {"0": ("Not reachable", colours.BAD), "1": ("Reachable", colours.GOOD)}
PASSED: Final[Words] = {"0": ("Rejected", colours.SILENT), "1": ("Promoted", colours.GOOD)}
ENABLED: Final[Words] = {"0": ("Off", colours.WARNING), "1": ("On", colours.GOOD)}


def by_rank(words: Words) -> list[models.ValueMapping]:
    """For `promql.ranked`."""
    return _mapped({str(rank): word for rank, word in enumerate(words.values(), start=1)})


def by_name(words: Words) -> list[models.ValueMapping]:
    return _mapped(words)


def names(words: Words) -> Sequence[str]:
    return list(words)


def _mapped(words: Words) -> list[models.ValueMapping]:
    options = {
        state: models.ValueMappingResult(text=text, color=colour, index=index)
        for index, (state, (text, colour)) in enumerate(words.items())
    }
    return [models.ValueMap(options=options)]

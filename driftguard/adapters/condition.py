"""The condition of a server after the newest scrape or export of its metrics."""

from __future__ import annotations

from typing import Final, Literal, get_args

Condition = Literal[
    "waiting",  # read once: the next scrape gives the first window
    "reporting",
    "idle",  # no token was generated since the previous scrape
    "stalled",  # nor for the requests that were running all the while
    "drafting_stopped",  # tokens were generated without any draft token
    "not_speculating",  # nor is it known to have drafted ever, also before its last start
    "metrics_hidden",  # its answer has no metrics of a serving engine
    "incomplete",  # its metrics need a setting, which is named
    "unreadable",  # it answers, but not with metrics
    "unreachable",
    "stale",  # its pushed exports have stopped
]
CONDITIONS: Final[tuple[Condition, ...]] = get_args(Condition)
RECORDED: Final[frozenset[Condition]] = frozenset({"reporting", "drafting_stopped"})  # there is a window
DOWN: Final[frozenset[Condition]] = frozenset({"unreadable", "unreachable", "stale"})

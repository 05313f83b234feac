"""What is known of a server after the newest scrape of its metrics, or the newest export of them."""

from __future__ import annotations

from typing import Final, Literal, get_args

Condition = Literal[
    "waiting",  # read once: the next scrape gives the first window
    "reporting",
    "idle",  # nothing was generated since the scrape before
    "drafting_stopped",  # tokens were generated without any draft token
    "not_speculating",  # its metrics have never shown speculation
    "metrics_hidden",  # it answers, without the metrics of a serving engine
    "incomplete",  # its metrics do not suffice without a setting, which is named
    "unreadable",  # it answers, but not with metrics
    "unreachable",
    "stale",  # its exports, which others push, have stopped
]
CONDITIONS: Final[tuple[Condition, ...]] = get_args(Condition)
RECORDED: Final[frozenset[Condition]] = frozenset({"reporting", "drafting_stopped"})  # there is a window
DOWN: Final[frozenset[Condition]] = frozenset({"unreadable", "unreachable", "stale"})

"""What is known of a scraped server after its newest scrape."""

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
]
CONDITIONS: Final[tuple[Condition, ...]] = get_args(Condition)
RECORDED: Final[frozenset[Condition]] = frozenset({"reporting", "drafting_stopped"})  # there is a window
DOWN: Final[frozenset[Condition]] = frozenset({"unreadable", "unreachable"})

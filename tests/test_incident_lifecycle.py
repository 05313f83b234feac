"""States of an incident: every pair of states is legal or refused by name; severities; the formula."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import product
from typing import get_args

import pytest

from driftguard.errors import BadInput
from driftguard.incident_lifecycle import (
    IllegalTransition,
    State,
    formula_slowdown,
    severity,
    transition,
)
from driftguard.records.documents.incident import IncidentEvidence

NOW = datetime(2026, 1, 1, tzinfo=UTC)
STATES: tuple[State, ...] = get_args(State)
LEGAL_PAIRS = {
    ("open", "acknowledged"),
    ("open", "mitigating"),
    ("open", "recovered_in_part"),
    ("open", "resolved"),
    ("acknowledged", "mitigating"),
    ("acknowledged", "recovered_in_part"),
    ("acknowledged", "resolved"),
    ("mitigating", "open"),
    ("mitigating", "acknowledged"),
    ("mitigating", "recovered_in_part"),
    ("mitigating", "resolved"),
    ("recovered_in_part", "open"),
    ("recovered_in_part", "acknowledged"),
    ("recovered_in_part", "resolved"),
}


@pytest.mark.parametrize(("before", "after"), list(product(STATES, STATES)))
def test_only_legal_transitions_pass(before: State, after: State) -> None:
    if (before, after) in LEGAL_PAIRS:
        step = transition(before, after, " because ", NOW)
        assert (step.from_state, step.to_state, step.reason) == (before, after, "because")
        return
    with pytest.raises(IllegalTransition) as refused:
        transition(before, after, "because", NOW)
    assert before in refused.value.detail
    assert after in refused.value.detail
    legal = refused.value.members["legal"]
    assert isinstance(legal, list)
    assert {(before, to) for to in legal} == {pair for pair in LEGAL_PAIRS if pair[0] == before}


def test_an_incident_begins_open() -> None:
    assert transition(None, "open", "drift", NOW).from_state is None
    with pytest.raises(IllegalTransition):
        transition(None, "resolved", "drift", NOW)


def test_a_reason_is_needed() -> None:
    with pytest.raises(BadInput, match="reason"):
        transition("open", "resolved", " ", NOW)


def test_a_fifth_slower_is_critical_and_a_rise_never_is() -> None:
    assert severity("down", 0.2) == "critical"
    assert severity("down", 0.19) == "warning"
    assert severity("down", None, 0.5) == "warning"
    assert severity("up", 0.9) == "info"


def test_a_fall_that_costs_next_to_nothing_is_information() -> None:
    assert severity("down", 0.019) == severity("down", -0.1) == "info"
    assert severity("down", 0.02) == "warning"
    assert severity("down", 0.25, page_slowdown=0.3) == "info"
    assert severity("down", -0.1, page_slowdown=0.0) == "warning"


def test_slowdowns() -> None:
    assert formula_slowdown(0.5, 0.0, 1) == pytest.approx(1 / 3)
    assert formula_slowdown(0.7, 0.35, 4) == pytest.approx(1 - 2.4 / 3.8)
    assert formula_slowdown(0.5, 0.75, 2) == pytest.approx(-0.25)


def test_the_slowdown_is_the_measured_one_where_there_is_one() -> None:
    assert IncidentEvidence(slowdown_measured=0.05, slowdown_formula=0.3).slowdown == 0.05
    assert IncidentEvidence(slowdown_formula=0.3).slowdown == 0.3
    assert IncidentEvidence().slowdown is None

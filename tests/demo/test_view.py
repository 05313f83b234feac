from __future__ import annotations

import io

from rich.console import Console

from driftguard.demo.view import Screen
from tests.alerting.http_receiver import wait_until

PAGE = "Acceptance of draft f8535118b639 (draft_model) on demo fell from 0.62 to 0.37 in segment code. " * 5


def test_what_runs_now_is_seen_on_a_small_terminal_after_a_long_page() -> None:
    output = io.StringIO()
    screen = Screen(Console(file=output, force_terminal=True, width=80, height=24))
    with screen.running():
        for number in range(6):
            with screen.stage("done", f"stage {number}") as stage:
                stage.note = PAGE
        with screen.stage("retrain", "Retrain, gate, promote") as stage:
            stage.note = "training a new draft"
            screen.step("mitigating")
            wait_until(lambda: "training a new draft" in output.getvalue(), "the running stage", 5.0)
            wait_until(lambda: "mitigating" in output.getvalue(), "the state of the loop", 5.0)

    assert "stage 0" in output.getvalue(), "what is done stands above the view"

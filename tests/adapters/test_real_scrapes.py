"""Scrapes of real servers that nobody here made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from driftguard.adapters.kinds import detect
from driftguard.adapters.reading import Reading
from driftguard.adapters.window import Identity
from driftguard.sources.condition import judge
from tests.adapters.readings import AFTER, BEFORE, window

SCRAPES = Path(__file__).resolve().parents[3] / "shared" / "data" / "scrapes"

pytestmark = pytest.mark.skipif(
    not SCRAPES.is_dir(), reason=f"needs the real scrapes in {SCRAPES}, which are not part of the repository"
)


def test_vllm_with_eagle3() -> None:
    text = (SCRAPES / "vllm_0_12__human-eval__L31-8B-I__eagle3.prom").read_text()
    started = next(line for line in text.splitlines() if line.startswith("process_start_time_seconds"))
    found = window("vllm", started + "\n", text)
    assert (found.steps, found.drafted, found.accepted) == (22_161, 66_483, 46_741)
    assert found.accepted_per_position == [18_771, 15_592, 12_378]
    assert found.num_speculative_tokens == 3
    assert found.target == "eagle3/Llama-3.1-8B-Instruct_RedHatAI_vllm-0.12.0"
    assert (found.generated, found.prompt_tokens) == (68_747, 27_130)
    assert found.time_to_first_token_seconds == pytest.approx(7.4396 / 164, rel=1e-3)
    # 0.9433 s is the sum of the requests' own means, in the same scrape
    assert found.time_per_output_token_seconds == pytest.approx(0.9433 / 164, rel=0.02)


@pytest.mark.parametrize("path", sorted(SCRAPES.glob("vllm_0_12__*.prom")), ids=lambda path: path.stem)
def test_vllm_positions_add_up_and_are_not_added_to_the_total(path: Path) -> None:
    text = path.read_text()
    found = window("vllm", "", text)
    assert found.accepted_per_position is not None
    assert sum(found.accepted_per_position) == found.accepted
    assert 0 < found.accepted < found.drafted < found.steps * 100
    assert found.condition == "reporting"


def test_vllm_that_does_not_speculate() -> None:
    text = (SCRAPES / "vllm_0_25_idle_no_speculation.prom").read_text()
    adapter = detect(text)
    assert adapter is not None
    assert adapter.kind == "vllm"
    before, after = (Reading.parse(text, adapter.names, at) for at in (BEFORE, AFTER))
    judged = judge(adapter, before, after, Identity("server"))
    assert (judged.condition, judged.windows) == ("not_speculating", ())


def llamacpp(values: dict[str, Any]) -> str:
    return "".join(f"{name} {value}\n" for name, value in values.items())


def test_llamacpp() -> None:
    first, second, *_ = json.loads((SCRAPES / "llamacpp_metrics_delta.json").read_text())
    for values in (first, second):
        found = window("llamacpp", "", llamacpp(values))
        assert (found.steps, found.drafted, found.accepted) == tuple(
            int(values[f"llamacpp:spec_decode_num_{name}_total"])
            for name in ("drafts", "draft_tokens", "accepted_tokens")
        )
        assert found.target is None, "nothing names the model"
        assert found.time_per_output_token_seconds == pytest.approx(
            values["llamacpp:tokens_predicted_seconds_total"] / values["llamacpp:tokens_predicted_total"]
        )

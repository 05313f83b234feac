"""Every engine that tells its numbers per request, the same history, the same incident."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from aiohttp import web

from driftguard.cli.replay import replay
from driftguard.detection import DetectorConfig, DriftOpened
from driftguard.records import AcceptanceRecord
from tests.proxy.engines import Json
from tests.proxy.serving import proxied

SEED = 20261122
K = 4
BEFORE, AFTER = 220, 100  # requests
AT_ONCE = 25


class Counts(NamedTuple):
    steps: int
    accepted: int
    histogram: list[int]  # of accepted tokens per step

    @property
    def drafted(self) -> int:
        return self.steps * K

    @property
    def output(self) -> int:
        return self.steps + self.accepted


def openai(counts: Counts, **told: Json) -> Json:
    usage = {"prompt_tokens": 7, "completion_tokens": counts.output}
    return {"model": "m", "choices": [{"index": 0, "message": {"content": "a"}}], "usage": usage, **told}


def vllm(counts: Counts) -> Json:
    numbers = {
        "num_spec_steps": counts.steps,
        "num_draft_tokens": counts.drafted,
        "num_accepted_draft_tokens": counts.accepted,
        "num_spec_tokens": K,
        "acceptance_histogram": counts.histogram,
    }
    return openai(counts, metrics={"speculative_decoding": numbers})


def details(counts: Counts) -> Json:
    return {
        "spec_verify_ct": counts.steps,
        "spec_num_proposed_drafts": counts.drafted,
        "spec_num_correct_drafts": counts.accepted,
        "spec_correct_drafts_histogram": counts.histogram,
    }


def sglang(counts: Counts) -> Json:
    return openai(counts, sglext={"spec_tokens_details": details(counts)})


def sglang_generate(counts: Counts) -> Json:
    return {"text": "a", "meta_info": {**details(counts), "completion_tokens": counts.output}}


def llamacpp(counts: Counts) -> Json:
    # The first token comes from reading the prompt.
    timings = {
        "predicted_n": counts.output + 1,
        "draft_n": counts.drafted,
        "draft_n_accepted": counts.accepted,
    }
    return openai(counts, timings=timings)


def triton(counts: Counts) -> Json:
    told = {"total_draft_tokens": str(counts.drafted), "total_accepted_draft_tokens": str(counts.accepted)}
    return {"text_output": "a", **told}


ENGINES: dict[str, tuple[str, str, Callable[[Counts], Json]]] = {
    "vllm": ("vllm", "/v1/chat/completions", vllm),
    "sglang": ("sglang", "/v1/chat/completions", sglang),
    "sglang generate": ("sglang", "/generate", sglang_generate),
    "llamacpp": ("llamacpp", "/v1/chat/completions", llamacpp),
    "triton": ("other", "/v2/models/m/generate", triton),
}


def history() -> list[Counts]:
    """Answers of some length, made of chains of K: each token is accepted with .8, then with .6."""
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    played = []
    for number in range(BEFORE + AFTER):
        tokens = int(rng.integers(60, 180))
        kept = np.cumprod(rng.random((tokens, K)) < (0.8 if number < BEFORE else 0.6), axis=1).sum(axis=1)
        kept = kept[: int(np.searchsorted(np.cumsum(kept + 1), tokens)) + 1]
        played.append(Counts(len(kept), int(kept.sum()), np.bincount(kept, minlength=K + 1).tolist()))
    return played


async def recorded(engine: str, path: str, answer: Callable[[Counts], Json]) -> list[AcceptanceRecord]:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        return web.json_response(answer(played[int(request.headers["number"])]))

    played = history()
    async with proxied(handle, engine=engine, target="t", num_speculative_tokens=K) as setup:

        async def ask(number: int) -> None:
            body = json.dumps({"prompt": "p", "number": number})
            headers = {"number": str(number)}
            async with setup.client.post(setup.proxy + path, data=body, headers=headers) as found:
                assert found.status == 200, await found.text()

        for first in range(0, len(played), AT_ONCE):
            await asyncio.gather(*map(ask, range(first, min(first + AT_ONCE, len(played)))))
        return list(await setup.sidecar.wait_for(len(played)))


@pytest.mark.parametrize("name", ENGINES)
def test_a_drift_ends_in_the_same_incident(name: str) -> None:
    records = asyncio.run(recorded(*ENGINES[name]))
    told = sorted((record.steps, record.drafted, record.accepted) for record in records)
    assert told == sorted((counts.steps, counts.drafted, counts.accepted) for counts in history())
    assert {record.fidelity for record in records} == {"request"}
    events = replay(records, DetectorConfig(minimum_drop=0.1))
    (opened,) = [event.finding for event in events if isinstance(event.finding, DriftOpened)]
    assert opened.direction == "down"
    assert [change.segment for change in opened.segments] == ["default"]
    assert abs(opened.change_point - BEFORE) <= AT_ONCE
    (change,) = opened.segments
    assert change.before.rate == pytest.approx(0.59, abs=0.02)
    assert change.after.rate == pytest.approx(0.33, abs=0.03)

"""The proxy before and behind the routers of vLLM and SGLang, with one real vLLM for all tests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.live import clients
from tests.live.install import ROUTERS
from tests.live.processes import of_all, proxy, sidecar
from tests.live.servers import (
    Engine,
    needs_routers,
    needs_vllm,
    router,
    running,
)
from tests.live.test_vllm_server import own_counts, since

pytestmark = [needs_vllm, needs_routers, pytest.mark.live, pytest.mark.timeout(900)]

DRAFTED = ["--draft", "small", "--method", "draft_model"]
REQUESTS = 24  # twelve per segment: six each of the four kinds


def ask(url: str) -> None:
    """Both kinds of requests, whole and streamed, whose segment stands in a header and in the body."""
    rng = random.Random(1)
    for number in range(REQUESTS):
        segment = ("code", "prose")[number % 2]
        usual: dict[str, Any] = {"model": clients.MODEL, "max_tokens": 24, "temperature": number // 2 % 2}
        usual |= {"extra_body": {"metadata": {"segment": segment}}, "stream": number // 4 % 2 == 1}
        prompt = f"def f{rng.randrange(100)}(x):\n"
        api = clients.client(url, segment)
        answer: Any
        if number // 8 % 2:
            answer = api.chat.completions.create(**usual, messages=[{"role": "user", "content": prompt}])
        else:
            answer = api.completions.create(**usual, prompt=prompt)
        if usual["stream"]:
            assert list(answer)


@pytest.mark.parametrize(
    ("name", "segment_from"),
    [("vllm-router", "header:X-DriftGuard-Segment"), ("sglang-router", "json:metadata.segment")],
)
def test_records_of_a_server_behind_a_router_add_up_to_its_own_counters(
    vllm: Engine, name: str, segment_from: str, database_url: str, tmp_path: Path
) -> None:
    """Behind SGLang's, headers of clients are missing, and the segment is read from the body."""
    before = own_counts(vllm)
    config = tmp_path / "proxy.toml"
    config.write_text(f'[proxy]\nsegment_from = "{segment_from}"\n')
    with sidecar(tmp_path / "sidecar", database_url) as beside:
        with (
            proxy(tmp_path, vllm.url, beside.url, *DRAFTED, "--config", str(config)) as through,
            running(router(name, through.url, tmp_path)) as front,
        ):
            ask(front.url)
            through.wait_sent(REQUESTS)
        records, own = beside.records(), since(vllm, before)
    assert own["drafted"] > 0
    assert {what: of_all(records)[what] for what in own} == own
    assert [sum(record.segment == one for record in records) for one in ("code", "prose")] == [12, 12]
    assert {record.target for record in records} == {clients.MODEL}


@pytest.mark.parametrize("name", ROUTERS)
def test_records_before_a_router_add_up_to_its_servers_own_counters(
    vllm: Engine, name: str, database_url: str, tmp_path: Path
) -> None:
    before = own_counts(vllm)
    named = ["--engine", "vllm"] if name == "sglang-router" else []  # it answers for models by itself
    with sidecar(tmp_path / "sidecar", database_url) as beside:
        with (
            running(router(name, vllm.url, tmp_path)) as behind,
            proxy(tmp_path, behind.url, beside.url, *DRAFTED, *named) as through,
        ):
            ask(through.url)
            through.wait_sent(REQUESTS)
        records, own = beside.records(), since(vllm, before)
    assert own["drafted"] > 0
    assert {what: of_all(records)[what] for what in own} == own

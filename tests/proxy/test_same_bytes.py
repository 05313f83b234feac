"""What the client receives through the proxy is, to the byte, what it would receive without."""

from __future__ import annotations

import asyncio
import random
from http import HTTPStatus

import pytest
from aiohttp import ClientSession

from tests.proxy.engines import CASES, COMPACT, SPACED, Answer, Case, Json, Style
from tests.proxy.serving import answering, proxied

SEED = 20261122


async def _ask(client: ClientSession, url: str, case: Case) -> tuple[int, str, bytes]:
    async with client.post(url + case.path, json=case.request) as answer:
        return answer.status, answer.headers["Content-Type"], await answer.read()


@pytest.mark.parametrize("style", [COMPACT, SPACED], ids=["compact", "spaced"])
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_bytes_and_counts(case: Case, style: Style) -> None:
    numbers = random.Random(SEED)
    print("seed", SEED)

    async def scenario() -> None:
        engine = answering(lambda request: case.answer(request, style), lambda: numbers.randint(1, 200))
        async with proxied(engine, engine=case.engine, num_speculative_tokens=4) as setup:
            direct = await _ask(setup.client, setup.engine, case)
            assert await _ask(setup.client, setup.proxy, case) == direct
            (record,) = await setup.sidecar.wait_for(1)
            assert (record.steps, record.drafted, record.accepted, record.emitted) == case.counts
            assert record.output_tokens == case.output_tokens
            assert record.fidelity == "request"
            assert (record.draft, record.draft_version, record.method) == ("unknown", "unknown", "unknown")
            if "stream" in case.name:
                assert record.time_to_first_token_seconds is not None

    asyncio.run(scenario())


DEEP = b'{"choices": ' + b"[" * 5_000 + b"]" * 5_000 + b', "error": 0, "usage": 0, "sglext": 0}'
NOT_UTF_8 = b'{"choices": [{"text": "\xff"}], "error": "\xfe", "usage": 0, "sglext": 0}'


@pytest.mark.parametrize("content", [DEEP, NOT_UTF_8], ids=["nested deeply", "not UTF-8"])
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_an_answer_that_cannot_be_read_passes_unchanged(case: Case, content: bytes) -> None:
    def answer(request: Json) -> Answer:
        is_whole = isinstance(case.answer(request, COMPACT), bytes)
        return content if is_whole else [b"data: " + content + b"\n\n", b"data: {}\n\n"]

    async def scenario() -> None:
        async with proxied(answering(answer), engine=case.engine, num_speculative_tokens=4) as setup:
            direct = await _ask(setup.client, setup.engine, case)
            assert direct[0] == HTTPStatus.OK
            assert await _ask(setup.client, setup.proxy, case) == direct

    asyncio.run(scenario())

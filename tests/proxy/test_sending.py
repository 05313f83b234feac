"""Records reach the sidecar once, whatever happens to it, and traffic never waits for it."""

from __future__ import annotations

import asyncio
from collections import Counter

import aiohttp
import pytest
from aiohttp import web, web_protocol

from driftguard.client import protocol
from driftguard.proxy import connections
from tests.conftest import PATIENCE_SECONDS
from tests.proxy.engines import Json, vllm
from tests.proxy.serving import Setup, answering, proxied, served
from tests.proxy.test_command import ENVIRONMENT, proxy

CHAT: Json = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_backoff", lambda state: 0.01)


async def _ask(setup: Setup, count: int, segment: str = "a") -> None:
    async def one() -> None:
        headers = {"X-DriftGuard-Segment": segment}
        async with setup.client.post(setup.proxy + PATH, json=CHAT, headers=headers) as answer:
            assert answer.status == 200
            await answer.read()

    await asyncio.gather(*(one() for _ in range(count)))


async def _metric(setup: Setup, name: str) -> float:
    async with setup.client.get(f"{setup.admin}/driftguard/metrics") as answer:
        (line,) = [line for line in (await answer.text()).splitlines() if line.startswith(name)]
    return float(line.rsplit(" ", 1)[1])


def test_records_wait_while_the_sidecar_is_away_and_arrive_once() -> None:
    async def scenario() -> None:
        async with proxied(answering(vllm), engine="vllm") as setup:
            setup.sidecar.status = 503
            await _ask(setup, 20)
            while setup.sidecar.posts < 3:
                await setup.sidecar.arrived.wait()
                setup.sidecar.arrived.clear()
            setup.sidecar.status = 200
            records = await setup.sidecar.wait_for(20)
            await _ask(setup, 1)
            await setup.sidecar.wait_for(21)
            assert set(Counter(record.record_id for record in records).values()) == {1}
            assert await _metric(setup, 'driftguard_proxy_records_total{outcome="sent"}') >= 20
            assert await _metric(setup, "driftguard_proxy_send_failures_total") >= 2

    asyncio.run(scenario())


def test_beyond_the_room_in_memory_the_oldest_records_are_dropped_and_counted() -> None:
    async def scenario() -> None:
        async with proxied(answering(vllm), engine="vllm", max_queued_records=5) as setup:
            setup.sidecar.status = 503
            await _ask(setup, 1, "first")
            while setup.sidecar.posts < 1:  # this one is being sent from now on
                await setup.sidecar.arrived.wait()
                setup.sidecar.arrived.clear()
            await _ask(setup, 3, "lost")
            await _ask(setup, 5, "kept")
            assert await _metric(setup, 'driftguard_proxy_records_total{outcome="dropped"}') == 3
            setup.sidecar.status = 200
            records = await setup.sidecar.wait_for(6)
            assert Counter(record.segment for record in records) == {"first": 1, "kept": 5}

    asyncio.run(scenario())


def test_what_the_sidecar_refuses_is_not_sent_again() -> None:
    async def scenario() -> None:
        async with proxied(answering(vllm), engine="vllm") as setup:
            setup.sidecar.status = 422
            await _ask(setup, 1, "refused")
            while setup.sidecar.posts < 1:
                await setup.sidecar.arrived.wait()
                setup.sidecar.arrived.clear()
            setup.sidecar.status = 200
            await _ask(setup, 1, "good")
            (record,) = await setup.sidecar.wait_for(1)
            assert record.segment == "good"
            assert await _metric(setup, 'driftguard_proxy_records_total{outcome="refused"}') == 1

    asyncio.run(scenario())


def test_smaller_batches_where_the_sidecar_asks_for_them() -> None:
    async def scenario() -> None:
        async with proxied(answering(vllm), engine="vllm", linger_seconds=0.2) as setup:
            setup.sidecar.most_lines = 4
            await _ask(setup, 20)
            records = await setup.sidecar.wait_for(20)
            assert len({record.record_id for record in records}) == len(records) == 20

    asyncio.run(scenario())


def test_at_the_end_requests_finish_and_their_records_are_sent() -> None:
    async def scenario() -> None:
        asked, go_on = asyncio.Event(), asyncio.Event()

        async def slow(request: object) -> object:
            asked.set()
            await go_on.wait()
            return await answering(vllm)(request)  # type: ignore[arg-type]

        async with proxied(slow, engine="vllm", linger_seconds=60) as setup:  # type: ignore[arg-type]
            running = asyncio.create_task(_ask(setup, 1))
            await asked.wait()
            stopping = asyncio.create_task(setup.stop())
            await asyncio.sleep(0.05)
            assert not stopping.done()
            go_on.set()
            await running
            await stopping
            assert len(setup.sidecar.records) == 1

    asyncio.run(scenario())


def test_requests_that_do_not_end_get_the_grace_of_the_settings_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[float] = []

    def at_once(seconds: float) -> asyncio.Timeout:
        waited.append(seconds)
        return asyncio.timeout(0)

    async def scenario() -> None:
        asked = asyncio.Event()

        async def endless(request: web.BaseRequest) -> web.StreamResponse:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

        async with proxied(endless, shutdown_grace_seconds=30) as setup:
            asking = asyncio.create_task(_ask(setup, 1))
            await asked.wait()
            for module in (connections, web_protocol):
                monkeypatch.setattr(module, "ceil_timeout", at_once)
            await setup.stop()
            assert sum(waited) == 30
            with pytest.raises(aiohttp.ClientError):
                await asking

    asyncio.run(scenario())


def test_the_key_for_the_sidecar_is_not_in_the_log(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(ENVIRONMENT, "DRIFTGUARD_API_KEY", "sesame-4711")

    async def refuses(request: web.BaseRequest) -> web.StreamResponse:
        return web.json_response({"detail": f"not with {request.headers['Authorization']}"}, status=401)

    async def scenario() -> None:
        async with served(answering(vllm)) as engine, served(refuses) as sidecar:
            with proxy("--upstream", engine, "--engine", "vllm", "--sidecar", sidecar) as (_, url):
                async with aiohttp.ClientSession() as client, client.post(url + PATH, json=CHAT) as answer:
                    assert answer.status == 200
                said = ""
                for _ in range(int(PATIENCE_SECONDS * 10)):
                    said += "".join(capfd.readouterr())
                    if "not with" in said:
                        break
                    await asyncio.sleep(0.1)
                assert "not with Bearer ***" in said
                assert "sesame-4711" not in said

    asyncio.run(scenario())

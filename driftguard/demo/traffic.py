"""Real requests over HTTP to the engine's OpenAI-compatible API, at a fixed concurrency.

Prompts are cut from text that exists on every machine. A route (the segment) takes its prompts from one
domain; the demo shifts the traffic by giving a route another domain, or by changing the routes' weights.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx
from driftguard_training.corpus import prompts

PROMPT_CHARACTERS = 160
FRESH_PROMPTS = 3_000  # of each domain
REQUEST_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request. `finished_at` is time.time(); counts are the engine's own."""

    finished_at: float
    route: str
    domain: str
    output_tokens: int
    drafted: int
    accepted: int
    error: str | None = None


@dataclass(slots=True)
class Load:
    """The current load. It is replaced as a whole, so that a worker never sees half a change."""

    weights: Mapping[str, float]
    domains: Mapping[str, str]
    speculation: bool = True


@dataclass(slots=True)
class Traffic:
    """Sends requests from a thread of its own until stopped. `answers` only grows, and may be read at any
    time."""

    base_url: str
    load: Load
    seed: int
    max_tokens: int = 64
    temperature: float = 1.0
    asked_again: int = FRESH_PROMPTS  # prompts of each domain that are asked again and again
    fresh: float = 0.0  # part of the requests that have another one
    concurrency: int = 4
    pause_seconds: float = 0.0  # between two requests of one worker, for background traffic
    answers: list[Answer] = field(default_factory=list)
    _prompts: dict[str, list[str]] = field(default_factory=dict)
    _running: threading.Event = field(default_factory=threading.Event)
    _idle: threading.Event = field(default_factory=threading.Event)
    _stopped: bool = False
    _thread: threading.Thread | None = None

    def prepare(self, domains: tuple[str, ...]) -> None:
        """Cuts the prompts. Raises driftguard_training's error if a domain has no text on this machine."""
        for domain in domains:
            self._prompts[domain] = prompts(
                domain, FRESH_PROMPTS, self.seed, characters=PROMPT_CHARACTERS, split="heldout"
            )

    def start(self) -> None:
        self._running.set()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="traffic", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Lets the requests in flight finish."""
        self._stopped = True
        if self._thread is not None:
            self._thread.join(REQUEST_TIMEOUT_SECONDS)

    def pause(self) -> None:
        """Returns when no request is in flight."""
        self._idle.clear()
        self._running.clear()
        self._idle.wait(REQUEST_TIMEOUT_SECONDS)

    def resume(self) -> None:
        self._running.set()

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency)
        timeout = httpx.Timeout(REQUEST_TIMEOUT_SECONDS)
        busy = [0]
        async with httpx.AsyncClient(
            base_url=self.base_url, limits=limits, timeout=timeout, trust_env=False
        ) as client:
            await asyncio.gather(
                *(
                    self._worker(client, random.Random(f"{self.seed}:{n}"), busy)
                    for n in range(self.concurrency)
                )
            )

    async def _worker(self, client: httpx.AsyncClient, choice: random.Random, busy: list[int]) -> None:
        while not self._stopped:
            if not self._running.is_set():
                if busy[0] == 0:
                    self._idle.set()
                await asyncio.sleep(0.01)
                continue
            busy[0] += 1
            self.answers.append(await self.ask(client, self.load, choice))
            busy[0] -= 1
            await asyncio.sleep(self.pause_seconds)

    async def ask(self, client: httpx.AsyncClient, load: Load, choice: random.Random) -> Answer:
        """One request of this load; the answer is not noted."""
        [route] = choice.choices(list(load.weights), weights=list(load.weights.values()))
        domain = load.domains[route]
        known = self._prompts[domain]
        body = {
            "model": "target",
            "prompt": choice.choice(known if choice.random() < self.fresh else known[: self.asked_again]),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": choice.getrandbits(31),
            **({} if load.speculation else {"num_speculative_tokens": 0}),
        }
        try:
            response = await client.post(
                "/v1/completions", json=body, headers={"X-DriftGuard-Segment": route}
            )
            response.raise_for_status()
        except httpx.HTTPError as error:
            return Answer(time.time(), route, domain, 0, 0, 0, error=f"{type(error).__name__}: {error}")
        answer = response.json()
        counts = (answer.get("metrics") or {}).get("speculative_decoding") or {}
        return Answer(
            finished_at=time.time(),
            route=route,
            domain=domain,
            output_tokens=answer["usage"]["completion_tokens"],
            drafted=counts.get("num_draft_tokens", 0),
            accepted=counts.get("num_accepted_draft_tokens", 0),
        )


def acceptance_rate(answers: list[Answer]) -> float | None:
    """sum(accepted) / sum(drafted), None when nothing was drafted."""
    drafted = sum(answer.drafted for answer in answers)
    return sum(answer.accepted for answer in answers) / drafted if drafted else None


def tokens_per_second(answers: list[Answer]) -> float | None:
    """Output tokens of all requests divided by the time from first to last, None for fewer than two
    answers."""
    if len(answers) < 2:
        return None
    seconds = answers[-1].finished_at - answers[0].finished_at
    return sum(answer.output_tokens for answer in answers[1:]) / seconds if seconds > 0 else None

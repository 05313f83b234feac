"""Requests, restarts, workers out of reach, failed scrapes, outages of the database and steps of the clock in
any order: what is stored adds up to what the server did while it was watched, and to no more."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from typing import NamedTuple

import pytest

from driftguard.settings import ScrapingSettings, SourceSettings
from driftguard.sources import scrape as module
from driftguard.sources.scrape import open_client, scrape
from driftguard.sources.source import Scraped, Source
from tests.adapters.fake_engines import (
    ENGINES,
    FakeBentoMl,
    FakeEngine,
    FakeLlamaCpp,
    FakeLmDeploy,
    FakeSGLang,
)
from tests.sources.served import Answer, Served, served
from tests.sources.stored import Stored

STEPS = 45
OF_WORKERS = (FakeSGLang, FakeLmDeploy)  # that no start time of one process describes
OUTAGES = ("is_away", "is_unanswered", "is_full")


class Clock:
    """That of the sidecar."""

    at = datetime(2026, 11, 1, tzinfo=UTC)

    @classmethod
    def now(cls, _tz: tzinfo) -> datetime:
        return cls.at


class Counts(NamedTuple):
    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    def plus(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))


class World:
    """One address, with the workers behind it, and its source. `done`: what they did since the first
    reading."""

    def __init__(self, rng: random.Random, kind: type[FakeEngine], server: Served) -> None:
        self.rng, self.kind, self.server = rng, kind, server
        self.started_at = 1_750_000_000.0
        count = rng.choice((1, 2, 3)) if kind in OF_WORKERS else 1
        self.workers = [kind(started_at=self.started_at) for _ in range(count)]
        for worker in self.workers:  # before they are watched
            worker.serve([3] * 500)
        self.missing: set[int] = set()
        self.answers = True
        self.stored = Stored()
        # The names of the engines' models are in their metrics, but for llama.cpp's and TGI's.
        settings = SourceSettings(url=server.url, server="chat", target="t", num_speculative_tokens=4)
        self.source = Source.of(settings)
        self.done, self.is_watched = Counts(), False
        self.told: list[str] = []
        server.pages[kind.path] = self.answer
        if kind is FakeLlamaCpp:
            server.headers["Process-Start-Time-Unix"] = "1"

    def answer(self) -> Answer:
        if not self.answers:
            return 503, ""
        texts = [self._labelled(n) for n in range(len(self.workers)) if n not in self.missing]
        if self.kind is FakeBentoMl and self.missing:
            texts = [self.workers[0].text().splitlines()[0] + "\n"]
        return 200, "sglang:up 1\n" * (self.kind is FakeSGLang) + "".join(texts)

    def _labelled(self, number: int) -> str:
        text = self.workers[number].text()
        if self.kind is FakeSGLang:
            return text.replace("{", f'{{worker_addr="http://{number}",')
        return text.replace('engine="0"', f'engine="{number}"')

    def serve(self) -> None:
        for worker in self.workers:
            kept = [self.rng.randint(0, 4) for _ in range(self.rng.choice((0, 1, 20, 200)))]
            worker.serve(kept, requests=self.rng.randint(0, 3) if kept else 0)
            if self.is_watched:
                self.done = self.done.plus(Counts(len(kept), 4 * len(kept), sum(kept)))

    def restart(self) -> None:
        """All of them, or one of several."""
        self.started_at += self.rng.choice((30.0, 3_600.0))
        if self.kind is FakeLlamaCpp:
            self.server.headers["Process-Start-Time-Unix"] = f"{self.started_at:.0f}"
        chosen = self.workers if self.rng.random() < 0.5 else [self.rng.choice(self.workers)]
        for worker in chosen:
            worker.restart(at=self.started_at)

    def lose(self) -> None:
        """A worker is out of reach, or in reach again."""
        may = self.kind is FakeBentoMl or (self.kind is FakeSGLang and len(self.workers) > 1)
        if may and self.is_watched:
            self.missing = set() if self.missing else {self.rng.randrange(len(self.workers))}

    def fail(self) -> None:
        setattr(self.stored, self.rng.choice(OUTAGES), True)

    def recover(self) -> None:
        for outage in OUTAGES:
            setattr(self.stored, outage, False)

    def step_clock(self) -> None:
        Clock.at += timedelta(seconds=self.rng.choice((-7_200, -60, 3_600)))

    def scrape(self, *, answers: bool = True) -> None:
        Clock.at += timedelta(seconds=self.rng.choice((1, 15, 300)))
        self.answers = answers
        if self.rng.random() < 0.4:
            self.recover()

        async def once() -> Scraped:
            async with open_client(ScrapingSettings()) as client:
                return await scrape(client, self.source, self.stored.submit)

        found = asyncio.run(once())
        self.is_watched |= self.source.before is not None
        self.told.append(f"{found.condition} {found.detail}")

    def recorded(self) -> Counts:
        total = Counts()
        for record in self.stored.records:
            total = total.plus(Counts(record.steps, record.drafted, record.accepted))
        return total

    def settle(self) -> None:
        self.recover()
        self.missing = set()
        for _ in range(3):
            self.scrape()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(module, "datetime", Clock)
    with served() as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ENGINES, ids=lambda kind: kind.kind)
def test_what_is_stored_adds_up_to_what_the_server_did(
    server: Served, kind: type[FakeEngine], seed: int
) -> None:
    rng = random.Random(f"{seed} {kind.kind}")
    world, acts = World(rng, kind, server), []
    loses_counts = seed < 3  # those between the last scrape and a restart, or in a step of the clock
    for _ in range(STEPS):
        act = rng.choices(
            ("serve", "scrape", "unread", "lose", "fail", "restart", "step_clock"),
            (40, 30, 8, 7, 5, *((6, 2) if loses_counts else (0, 0))),
        )[0]
        acts.append(act)
        if act in ("scrape", "unread"):
            world.scrape(answers=act == "scrape")
        else:
            getattr(world, act)()
        recorded = world.recorded()
        assert all(a <= b for a, b in zip(recorded, world.done, strict=True)), (recorded, world.done, acts)
    world.settle()
    recorded = world.recorded()
    assert all(a <= b for a, b in zip(recorded, world.done, strict=True)), (recorded, world.done, acts)
    if not loses_counts:
        assert recorded == world.done, (acts, world.told)

"""llama.cpp prints its counters with six significant digits: above a million they are rounded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import pairwise

import numpy as np
import pytest

from driftguard.adapters import prometheus_history
from driftguard.adapters.kinds import ADAPTERS
from driftguard.adapters.reading import Reading, Unfinished
from driftguard.adapters.window import Identity
from driftguard.records import AcceptanceRecord
from driftguard.sources.condition import Judged, judge
from tests.adapters.fake_engines import FakeLlamaCpp, K
from tests.adapters.readings import BEFORE

IDENTITY = Identity("server", target="target")
FIRST = 0.75  # how often the first draft token is accepted, and each next one as often again


class Served:
    """A llama.cpp server that has drafted `before` tokens, and serves up to 800 steps every 15 seconds."""

    def __init__(self, before: int, seed: int = 1, rate: float = FIRST) -> None:
        self.engine, self._rng, self._rate = FakeLlamaCpp(), np.random.default_rng(seed), rate
        self._serve(before // K)
        self.at = BEFORE
        self._before = self.read()
        self._unfinished: Unfinished | None = None

    def _serve(self, steps: int) -> None:
        self.engine.steps += steps
        for place in range(K):
            self.engine.drafted[place] += steps
        kept = steps
        for place in range(K):
            kept = int(self._rng.binomial(kept, self._rate))
            self.engine.accepted[place] += kept

    def read(self) -> Reading:
        return Reading.parse(self.engine.text(), ADAPTERS["llamacpp"].names, self.at)

    def scrape(self, steps: int = 400) -> tuple[Judged, list[AcceptanceRecord]]:
        self._serve(steps)
        self.at += timedelta(seconds=15)
        reading = self.read()
        judged = judge(ADAPTERS["llamacpp"], self._before, reading, IDENTITY, unfinished=self._unfinished)
        self._unfinished = judged.unfinished
        records = [window.record(IDENTITY) for window in judged.windows]
        if not judged.goes_on:
            self._before = reading
        return judged, records

    def records(self, scrapes: int) -> Iterator[tuple[AcceptanceRecord, float]]:
        """With the true acceptance of the time that each is of."""
        drafted, accepted = sum(self.engine.drafted), sum(self.engine.accepted)
        for _ in range(scrapes):
            _, records = self.scrape(int(self._rng.integers(1, 800)))
            for record in records:
                now = sum(self.engine.drafted), sum(self.engine.accepted)
                yield record, (now[1] - accepted) / (now[0] - drafted)
                drafted, accepted = now


@pytest.mark.parametrize("before", [10**6, 5 * 10**6, 10**8, 5 * 10**8, 10**9 - 10**6])
@pytest.mark.parametrize("rate", [FIRST, 0.999])
def test_no_window_is_refused_and_its_acceptance_is_exact_to_half_a_hundredth(
    before: int, rate: float
) -> None:
    server = Served(before, rate=rate)
    found = list(server.records(1_400))
    assert len(found) >= 2
    print(f"{len(found)} windows; largest error {max(abs(r.accepted / r.drafted - x) for r, x in found):.4f}")
    for record, truth in found:
        assert abs(record.accepted / record.drafted - truth) < 0.005
        assert record.accepted_per_position is not None
        assert sum(record.accepted_per_position) == record.accepted


def test_nothing_is_lost_while_a_window_goes_on() -> None:
    server = Served(10**8)
    accepted = sum(server.engine.accepted)
    records = [record for record, _ in server.records(200)]
    until_newest = sum(record.accepted for record in records)
    assert until_newest <= sum(server.engine.accepted) - accepted
    assert all(one.ended_at == two.started_at for one, two in pairwise(records))
    assert records[0].started_at == BEFORE


def test_the_source_says_how_precise_it_is_and_is_not_taken_for_idle() -> None:
    server = Served(5 * 10**8)
    for _ in range(40):
        judged, _ = server.scrape()
        assert judged.condition == "reporting"
        assert "steps of 1,000 draft tokens" in judged.detail
        assert "200,000" in judged.detail


def test_a_server_that_stopped_drafting_or_is_idle_is_still_told_so() -> None:
    server = Served(5 * 10**8)
    conditions = []
    for _ in range(200):
        server.engine.plain_tokens += 2_000
        conditions.append(server.scrape(steps=0)[0].condition)
    assert "drafting_stopped" in conditions
    server = Served(5 * 10**8)
    assert {server.scrape(steps=0)[0].condition for _ in range(20)} == {"idle"}


@pytest.mark.parametrize("before", [10**6, 5 * 10**6, 5 * 10**8])
def test_an_idle_server_is_told_so_though_its_window_goes_on_and_loses_nothing_by_it(before: int) -> None:
    server = Served(before)
    records: list[AcceptanceRecord] = []
    while not records:
        records = server.scrape()[1]
    while not server.scrape(steps=100)[0].goes_on:
        pass
    assert {server.scrape(steps=0)[0].condition for _ in range(20)} == {"idle"}
    judged, after = server.scrape(steps=100)
    assert judged.condition == "reporting"
    while not after:
        after = server.scrape()[1]
    assert after[0].started_at <= server.at - timedelta(seconds=15 * 22)


@pytest.mark.parametrize(("before", "plain_tokens"), [(10**6, 200), (5 * 10**6, 2_000), (5 * 10**8, 20_000)])
def test_a_server_that_stopped_drafting_is_told_so_until_it_drafts_again(
    before: int, plain_tokens: int
) -> None:
    """Where it stops, its window has a few draft tokens, of which the acceptance would not be exact."""
    server = Served(before)
    while not server.scrape()[1]:
        pass
    while not server.scrape(steps=100)[0].goes_on:
        pass
    found, windows, stopped_at = [], list[AcceptanceRecord](), server.at
    for _ in range(200):
        server.engine.plain_tokens += plain_tokens
        judged, records = server.scrape(steps=0)
        found.append(judged.condition)
        windows += records
    first = found.index("drafting_stopped")
    assert set(found[:first]) <= {"reporting"}
    assert set(found[first:]) == {"drafting_stopped"}
    assert "tokens without a draft" in judged.detail
    assert {record.drafted for record in windows} == {0}
    assert windows[0].started_at == stopped_at
    assert all(one.ended_at == two.started_at for one, two in pairwise(windows))
    printed = 10 ** (len(str(server.engine.generated)) - 6)
    assert sum(record.output_tokens or 0 for record in windows) == pytest.approx(
        200 * plain_tokens, abs=printed
    )
    assert server.scrape(steps=0)[0].condition == "idle"
    drafted, records = sum(server.engine.drafted), []
    while not records:
        judged, records = server.scrape()
        assert judged.condition == "reporting"
    assert records[0].drafted == pytest.approx(sum(server.engine.drafted) - drafted, rel=0.01)


def test_so_is_one_that_stopped_where_its_last_window_ended() -> None:
    server = Served(10**6)
    while not server.scrape()[1]:
        pass
    for plain_tokens in (3_000, 100, 100):
        server.engine.plain_tokens += plain_tokens
        judged, records = server.scrape(steps=0)
        assert judged.condition == "drafting_stopped"
        assert [(record.drafted, record.output_tokens) for record in records] == [(0, plain_tokens)]


def test_below_a_million_windows_are_as_before() -> None:
    server = Served(10_000)
    judged, (record,) = server.scrape()
    assert (record.steps, record.drafted, judged.detail) == (400, 1_600, "")


def test_history_of_prometheus_is_read_in_windows_as_long() -> None:
    server = Served(5 * 10**8)
    values: dict[str, list[tuple[float, str]]] = {}
    for _ in range(300):
        server.scrape()
        for line in server.engine.text().splitlines():
            name, value = line.rsplit(" ", 1)
            values.setdefault(name, []).append((server.at.timestamp(), value))
    result = [{"metric": _metric(name), "values": told} for name, told in values.items()]
    found = list(prometheus_history.windows(_answer(result), IDENTITY))
    assert len(found) >= 2
    for _, window in found:
        window.record(IDENTITY)
        assert window.drafted >= 200_000


def _metric(series: str) -> dict[str, str]:
    name, _, labels = series.partition("{")
    position = labels.removeprefix('position="').removesuffix('"}')
    return {"__name__": name, "instance": "a:8080"} | ({"position": position} if labels else {})


def _answer(result: Sequence[Mapping[str, object]]) -> bytes:
    return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}}).encode()

"""The bodies of requests: their items, and the room that they share."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftguard.api import request_body, room
from driftguard.api.problems import MalformedBody
from driftguard.api.request_body import split_items
from driftguard.api.room import WaitingRoom
from driftguard.errors import Busy

values = st.recursive(
    st.one_of(st.text(), st.integers(), st.none(), st.booleans()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(values), st.sampled_from([None, 1]), st.booleans(), st.sampled_from([2, 65_536]))
def test_an_array_is_taken_apart_where_its_items_end(
    items: list[Any], indent: int, ascii_only: bool, part_bytes: int
) -> None:
    body = bytearray(b" \n" + json.dumps(items, indent=indent, ensure_ascii=ascii_only).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_body, "_PART_BYTES", part_bytes)
        found = list(split_items(body, "application/json"))
    assert [number for number, _ in found] == list(range(1, len(items) + 1))
    assert [json.loads(item) for _, item in found] == items


@given(st.lists(values | st.just("")))
def test_lines_are_taken_apart_and_blank_ones_only_counted(items: list[Any]) -> None:
    lines = ["" if item == "" else json.dumps(item) for item in items]
    found = list(split_items("\n".join([*lines, "1"]).encode(), "application/x-ndjson"))
    expected = [(number, item) for number, item in enumerate(items, start=1) if item != ""]
    assert [(number, json.loads(item)) for number, item in found] == [*expected, (len(lines) + 1, 1)]


@pytest.mark.parametrize("body", [b"[1,2", b"[1 2]", b"[1,]", b"[1] 2", b"[{]}", b'["a]', b"[" * 100_000])
def test_what_is_no_array_is_refused_whole(body: bytes) -> None:
    with pytest.raises(MalformedBody, match="not a valid JSON array"):
        list(split_items(body, "application/json"))


def test_room_is_given_in_the_order_of_arrival_and_comes_back_however_its_use_ended() -> None:
    told: list[str] = []

    async def use(shared: WaitingRoom, name: str, size: int) -> None:
        async with shared.taken(size):
            told.append(name)
            await asyncio.sleep(0)
            if name == "raises":
                raise ValueError(name)

    async def all_of_it() -> None:
        shared = WaitingRoom(10)
        async with shared.taken(7):
            names = {"larger than the room": 50, "raises": 4, "small": 3}
            tasks = [asyncio.create_task(use(shared, name, size)) for name, size in names.items()]
            gone = asyncio.create_task(use(shared, "gone", 1))
            await asyncio.sleep(0.01)
            assert told == []  # three would fit, and do not overtake
            gone.cancel()
        await asyncio.gather(*tasks, gone, return_exceptions=True)
        assert told == ["larger than the room", "raises", "small"]
        async with shared.taken(10):
            pass

    asyncio.run(all_of_it())


def test_who_waits_for_room_too_long_is_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "WAIT_SECONDS", 0.01)

    async def wait() -> None:
        shared = WaitingRoom(10)
        async with shared.taken(10):
            with pytest.raises(Busy):
                async with shared.taken(1):
                    pass
            async with shared.taken(0):
                pass
        async with shared.taken(10):
            pass

    asyncio.run(wait())

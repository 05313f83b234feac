"""Record ids: as RFC 9562 lays them out, in the order of time, and never the same twice."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from uuid import RFC_4122, UUID

import pytest

from driftguard.records import new_record_id, record_ids


def test_an_id_is_of_version_7_and_begins_with_the_milliseconds_of_its_making() -> None:
    before = time.time_ns() // 1_000_000
    made = new_record_id()
    after = time.time_ns() // 1_000_000
    assert (made.version, made.variant) == (7, RFC_4122)
    assert before <= made.int >> 80 <= after


@pytest.mark.parametrize(
    ("nanoseconds", "fraction"), [(0, 0x000), (244, 0x000), (245, 0x001), (500_000, 0x800), (999_999, 0xFFF)]
)
def test_the_12_bits_after_the_version_are_the_fraction_of_the_millisecond(
    nanoseconds: int, fraction: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_ids, "time_ns", lambda: 0x017F22E279B0 * 1_000_000 + nanoseconds)
    made = str(new_record_id())  # the moment of the RFC's own example, appendix A.6
    assert made.startswith(f"017f22e2-79b0-7{fraction:03x}-")


def test_ids_made_one_after_another_are_in_order() -> None:
    made = [new_record_id() for _ in range(20_000)]
    assert made == sorted(made)


def test_the_random_bits_are_all_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_ids, "time_ns", lambda: 0)
    made = [new_record_id().int & (2**62 - 1) for _ in range(200)]
    ones = [sum(value >> bit & 1 for value in made) for bit in range(62)]
    assert all(50 < count < 150 for count in ones)  # of 200 fair coins; 7 standard deviations


def test_no_id_is_made_twice_by_threads_at_the_same_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_ids, "time_ns", lambda: 0)
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(lambda _: [new_record_id() for _ in range(5_000)], range(8)))
    assert len({made for part in parts for made in part}) == 40_000


def test_no_id_is_made_twice_by_whoever_seeds_the_random_numbers_of_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(record_ids, "time_ns", lambda: 0)
    made: list[UUID] = []
    state = random.getstate()
    try:
        for _ in range(3):
            random.seed(0)
            made.append(new_record_id())
    finally:
        random.setstate(state)
    assert len(set(made)) == 3


def test_a_forked_process_does_not_make_the_ids_of_its_parent() -> None:
    source = """
import os
from driftguard.records import record_ids
record_ids.time_ns = lambda: 0
for _ in range(3):
    if os.fork() == 0:
        break
os.write(1, f"{record_ids.new_record_id()}\\n".encode())
"""
    printed = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True
    ).stdout
    assert len(set(printed.split())) == 4

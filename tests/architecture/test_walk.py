"""How many files a reader goes through to follow the fold: upper bounds, lowered when fewer are measured."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from driftguard.incident_lifecycle import severity
from driftguard.masking import address
from driftguard.store.database import Database
from tests.architecture.walk import Walk, incident_opens, quiet_record, shown, walked, warmed


@pytest.mark.parametrize(
    ("walk", "most_files", "most_edges"), [(incident_opens, 63, 141), (quiet_record, 30, 65)]
)
def test_the_fold_goes_through_few_files(
    postgres_server: str,
    template_database: str,
    walk: Callable[[Database], Walk],
    most_files: int,
    most_edges: int,
) -> None:
    found = warmed(walk, postgres_server, template_database)
    assert len(found.files) <= most_files, shown(walk.__name__, found)
    assert len(found.edges) <= most_edges, shown(walk.__name__, found)


def test_only_what_is_walked_is_counted_and_not_what_others_begin_meanwhile() -> None:
    """As the sidecar of another test, which a Prometheus reads: its threads begin when it is asked."""
    with ThreadPoolExecutor(1) as other:
        other.submit(int).result()  # its thread was there before
        with walked() as walk:
            other.submit(call_on_a_thread, lambda: address("http://a")).result()
            call_on_a_thread(lambda: severity("up", None))
    assert walk.files == {"incident_lifecycle.py"}


def call_on_a_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()

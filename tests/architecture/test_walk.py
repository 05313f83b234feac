"""How many files a reader goes through to follow the fold: upper bounds, lowered when fewer are measured."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from driftguard.store.database import Database
from tests.architecture.walk import Walk, incident_opens, quiet_record, shown, warmed


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

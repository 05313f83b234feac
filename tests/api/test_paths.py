"""Names in paths that nobody gave: too long, no text, leading elsewhere. Never an internal error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from fastapi import FastAPI
from fastapi.routing import iter_route_contexts

from driftguard.app import Sidecar, create_app
from driftguard.settings import Settings
from driftguard.store.database import Database
from tests.api.ingest_server import serving

NAMES = [
    "x" * 5_000,
    "%00",
    "..%2f..%2fetc%2fpasswd",
    "%ff",
    "%ed%a0%80",  # a lone surrogate
    "-1",
    "9" * 40,
    "00000000-0000-0000-0000-000000000000",
]


def paths(app: FastAPI) -> Iterator[tuple[str, str]]:
    """(method, path) with {} for the one name that is asked for."""
    for route in iter_route_contexts(app.routes):
        path = route.path or ""
        for name in re.findall(r"{[^}]*}", path):
            yield from ((method, path.replace(name, "{}")) for method in sorted(route.methods or ()))


def test_a_name_in_a_path_that_nobody_gave_is_no_internal_error(database: Database, tmp_path: Path) -> None:
    app = create_app(Sidecar(Settings(data_dir=tmp_path), database, "http://sidecar"))
    asked = list(paths(app))
    assert len(asked) >= 10
    assert ("GET", "/runbooks/{}") in asked
    assert ("GET", "/static/{}") in asked
    with serving(app) as client:
        answers = {
            f"{method} {path} {name[:30]}": client.request(method, path.replace("{}", name)).status_code
            for method, path in asked
            for name in NAMES
        }
    assert {asked: status for asked, status in answers.items() if not 400 <= status < 500} == {}

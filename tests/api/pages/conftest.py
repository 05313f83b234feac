"""A real headless Chromium, and what it must not do while it shows a page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from sqlalchemy import update

from driftguard.store.database import Database
from driftguard.store.tables import Source, Stream
from tests.api.pages.scene import Scene, fleet

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

PATIENCE_MILLISECONDS = 60_000  # with a browser on a machine that runs other tests as well

Opener = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium on the PATH; on Debian: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        expect.set_options(timeout=PATIENCE_MILLISECONDS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def fleet_of_all(
    browser: Browser, module_database_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    database = Database.open(module_database_url)
    with fleet(database, tmp_path_factory.mktemp("scene")) as scene:
        yield scene
    database.close()


@pytest.fixture
def scene(fleet_of_all: Scene) -> Scene:
    """Its records look new: after five minutes of other tests its streams and sources would be stale."""
    now = datetime.now(UTC)
    with fleet_of_all.database.session() as session:
        session.execute(
            update(Stream)
            .where(Stream.traffic_arrived_at.is_not(None))
            .values(traffic_arrived_at=now, traffic_ended_at=now)
        )
        session.execute(update(Source).values(scraped_at=now))
    return fleet_of_all


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Opener]:
    """Opens a URL in a window of its own; an error that the browser reports fails the test at its end.

    `allowed`: a part of an error message that the test expects, such as a 401.
    """
    contexts, complaints, is_over = [], [], False

    def opened(url: str, *, allowed: str = "\0", **options: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        origin = "/".join(url.split("/")[:3])

        def complain(text: str) -> None:
            if allowed not in text and not is_over:  # requests still running at the end are cancelled
                complaints.append(f"{page.url}: {text}")

        page.on("console", lambda message: complain(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complain(str(error)))
        page.on(
            "requestfailed",
            lambda request: (
                None  # an update of a page that is left is cancelled by the browser
                if (request.failure, request.resource_type) == ("net::ERR_ABORTED", "fetch")
                else complain(f"{request.url} failed: {request.failure}")
            ),
        )
        page.on(
            "request",
            lambda request: (
                None
                if request.url.startswith((origin, "data:", "blob:"))
                else complain(f"asked {request.url}")
            ),
        )
        page.goto(url, wait_until="load")
        return page

    yield opened
    is_over = True
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="module")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every page is kept as a picture: DRIFTGUARD_SCREENSHOTS, else under --basetemp."""
    named = os.environ.get("DRIFTGUARD_SCREENSHOTS")
    directory = Path(named) if named else tmp_path_factory.mktemp("screenshots")
    directory.mkdir(parents=True, exist_ok=True)
    return directory

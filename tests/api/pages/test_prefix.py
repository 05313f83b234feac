"""The pages under a path of a reverse proxy: every link, button and chart stays below it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin

import pytest
from playwright.sync_api import Browser, expect

from driftguard.store.database import Database
from driftguard.store.keys import create_key
from tests.alerting.incident_rows import add_incident
from tests.api.pages.conftest import Opener
from tests.api.pages.scene import Scene, fleet
from tests.api.reverse_proxy import EXTERNAL_URL, FORMS, PREFIX, Form, behind

pytestmark = pytest.mark.slow

GRAFANA = "https://grafana.example.com"
_LINK = re.compile(r'\b(href|src|action|data-post)="([^"#][^"]*)"')


@pytest.fixture(scope="module")
def fleet_of_all(
    browser: Browser, module_database_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    database = Database.open(module_database_url)
    alerting = {"external_url": EXTERNAL_URL, "grafana_url": GRAFANA}
    with fleet(database, tmp_path_factory.mktemp("scene"), alerting) as scene:
        yield scene
    database.close()


@pytest.mark.parametrize("form", FORMS)
def test_every_link_and_button_of_every_page_leads_below_the_prefix(scene: Scene, form: Form) -> None:
    with behind(scene.client, form) as client:
        home = f"{client.base_url}{PREFIX}/"
        waiting, posts, seen = [home], set[str](), set[str]()
        while waiting:
            if (page := waiting.pop()) in seen:
                continue
            seen.add(page)
            answer = client.get(page)
            if answer.is_redirect:
                assert answer.headers["location"].startswith(GRAFANA), page
                continue
            assert answer.status_code == 200, page
            if not answer.headers["content-type"].startswith("text/html"):
                continue
            for kind, link in _LINK.findall(answer.text):
                to = urljoin(page, link.replace(EXTERNAL_URL, home)).partition("#")[0]
                if to.startswith("data:"):
                    continue
                assert to.startswith(home), (page, link)
                (posts.add if kind == "data-post" else waiting.append)(to)
        assert {each.removeprefix(home).split("/")[0].split("?")[0] for each in seen} == {
            *("", "api", "configuration", "dashboards", "docs", "incidents", "metrics", "retraining"),
            *("runbooks", "static", "streams"),
        }
        assert posts
        assert {each: client.get(each).status_code for each in posts} == dict.fromkeys(posts, 405)


def test_both_kinds_of_proxies_show_pages_that_live_and_decide(
    scene: Scene, open_page: Opener, screenshots: Path
) -> None:
    with scene.database.session() as session:
        key = create_key(session, "operator")
    undecided = add_incident(scene.database, [])
    for form, button, outcome in zip(
        FORMS, ("Acknowledge", "Resolve"), ("acknowledged", "resolved"), strict=True
    ):
        with behind(scene.client, form) as client:
            home = f"{client.base_url}{PREFIX}/"
            page = open_page(home)
            page.screenshot(path=screenshots / f"prefix-{outcome}-fleet.png", full_page=True)
            page.get_by_text("Search, filter, order, group").click()
            page.get_by_label("Search").fill("chat-eu")
            page.keyboard.press("Enter")
            page.wait_for_url(f"{home}?q=chat-eu*")
            page.get_by_role("link", name="chat-eu-1").first.click()
            page.wait_for_url(f"{home}streams/{scene.streams['chat-eu-1']}")
            expect(page.locator("#charts canvas").first).to_be_visible()
            page.screenshot(path=screenshots / f"prefix-{outcome}-stream.png", full_page=True)
            page.locator("#marks a", has_text="acceptance fell").click()
            page.wait_for_url(f"{home}incidents/{scene.incident_id}*")
            expect(page.locator("#charts canvas").first).to_be_visible()
            page.goto(f"{home}incidents/{undecided}")
            page.get_by_label("API key").fill(key)
            page.get_by_label("Reason").fill("looking at it")
            page.get_by_role("button", name=button, exact=True).click()
            expect(page.locator("#decide [role=status]")).to_have_text(f"The incident is {outcome}.")
            page.evaluate("look()")
            expect(page.locator("[data-live=history]")).to_contain_text("looking at it")
            expect(page.locator("#stale")).to_be_hidden()
            page.screenshot(path=screenshots / f"prefix-{outcome}-incident.png", full_page=True)
            page.get_by_role("link", name="Retraining", exact=True).click()
            page.wait_for_url(f"{home}retraining")
            page.get_by_role("link", name="DriftGuard", exact=True).click()
            page.wait_for_url(home)
            page.close()  # before its proxy is, which it would ask again

"""Right-to-left names on the pages: kept apart, so that the words after them stay in their place."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from driftguard.api.pages.direction import isolated
from driftguard.store.database import Database
from tests.pipeline.sidecar import post, running_sidecar
from tests.pipeline.traffic import Traffic

SERVER, TARGET, SEGMENT, VERSION = "שרת ראשי 1", "دردشة", "קוד (פייתון)", "גרסה 2"
RIGHT_TO_LEFT = re.compile("[\u0590-\u08ff]")


class Bare(HTMLParser):
    """The texts of a page that hold right-to-left letters and are not kept apart."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.apart = self.seen = 0
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.apart += tag in ("bdi", "title", "option", "script")

    def handle_endtag(self, tag: str) -> None:
        self.apart -= tag in ("bdi", "title", "option", "script")

    def handle_data(self, data: str) -> None:
        if RIGHT_TO_LEFT.search(data):
            self.seen += 1
            if not self.apart:
                self.found.append(data)


@pytest.mark.parametrize(
    ("page", "shown"),
    [
        ("<p>in שרת-1, fell to 0.36</p>", "<p>in <bdi>שרת-1</bdi>, fell to 0.36</p>"),
        ("<p>in קוד (פייתון), 0.36</p>", "<p>in <bdi>קוד (פייתון)</bdi>, 0.36</p>"),
        ("<p>שרת: 3 of خادم.</p>", "<p><bdi>שרת</bdi>: 3 of <bdi>خادم</bdi>.</p>"),
        ("<p>צ&#39;אט &amp; 3</p>", "<p><bdi>צ&#39;אט</bdi> &amp; 3</p>"),
        ("<code>--server eu/שרת</code>", "<code>--server <bdi>eu/שרת</bdi></code>"),
        ('<a title="שרת">a</a><bdi>שרת 1</bdi>', '<a title="שרת">a</a><bdi>שרת 1</bdi>'),
        ("<title>שרת</title><option>שרת</option>", "<title>שרת</title><option>שרת</option>"),
        ("<script>{'שרת': 1 < 2}</script>", "<script>{'שרת': 1 < 2}</script>"),
        ("<p>服务器 über émoji 0.36</p>", "<p>服务器 über émoji 0.36</p>"),
    ],
)
def test_a_right_to_left_name_is_kept_apart_from_the_words_around_it(page: str, shown: str) -> None:
    assert isolated(page) == shown


def test_names_on_the_pages_are_kept_apart(database: Database, tmp_path: Path) -> None:
    drawn = Traffic(seed=3).draw(20, {SEGMENT: 0.8}, draft_version=VERSION, server=SERVER)
    with running_sidecar(database, tmp_path) as client:
        post(client, [msgspec.structs.replace(record, target=TARGET) for record in drawn])
        (stream,) = client.get("/api/v1/status").json()["streams"]
        for path in ("/", "/?view=wall", f"/streams/{stream['id']}"):
            page = Bare(client.get(path).text)
            assert page.seen >= 1
            assert page.found == [], path
        fleet = client.get("/").text
    for name in (SERVER, TARGET, VERSION):
        assert f"<bdi>{name}</bdi>" in fleet

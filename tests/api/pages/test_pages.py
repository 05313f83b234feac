"""The status pages in a real browser: what they say, how they look, who can use them, what they refuse."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Literal

import httpx
import msgspec
import pytest
from playwright.sync_api import FloatRect, Page, Route, expect
from sqlalchemy import select

from driftguard.app import Sidecar, create_app
from driftguard.pipeline.held import VERSION
from driftguard.retraining.ledger.training_curve import with_report
from driftguard.settings import Settings
from driftguard.store import folding, retrain_runs
from driftguard.store.database import Database
from driftguard.store.keys import create_key
from driftguard.store.tables import Draft, Incident, Stream
from tests.alerting.http_receiver import wait_until
from tests.alerting.incident_rows import add_incident, add_stream, resolve
from tests.api.ingest_server import serving
from tests.api.pages.conftest import Opener
from tests.api.pages.scene import Scene, running_curve, settings
from tests.pipeline.sidecar import post
from tests.pipeline.traffic import Traffic

pytestmark = pytest.mark.slow

LOOKS = Path(__file__).with_name("looks.js").read_text(encoding="utf-8")
SCREENS: dict[str, tuple[Literal["light", "dark"], int]] = {
    "light": ("light", 1280),
    "dark": ("dark", 1280),
    "half a screen": ("light", 960),
    "tablet": ("light", 768),
    "phone": ("light", 390),
}
ABOVE_THE_FOLD: FloatRect = {"x": 0, "y": 0, "width": 1280, "height": 800}  # as docs/screenshots shows it
PAGES = ("fleet", "wall", "configuration", "stream", "incident", "retraining", "running", "done", "runbook")
FOCUSABLE = "[...document.querySelectorAll('a[href], button, select, input, summary, [tabindex=\"0\"]')]"
FOCUSABLE += ".filter((each) => each.checkVisibility())"
HEAVIEST_BYTES = 150_000
PHONE_SCREEN = 844
TRANSFERRED = "performance.getEntries().reduce((sum, each) => sum + (each.transferSize ?? 0), 0)"


def address(scene: Scene, name: str) -> str:
    paths = {
        "fleet": "/",
        "wall": "/?view=wall&group=server",
        "configuration": "/configuration",
        "stream": f"/streams/{scene.streams['chat-eu-1']}",
        "incident": f"/incidents/{scene.incident_id}",
        "retraining": "/retraining",
        "running": f"/retraining/{scene.running_id}",
        "done": f"/retraining/{scene.done_id}",
        "runbook": "/runbooks/DriftGuardAcceptanceDrift",
    }
    return f"{scene.client.base_url}{paths[name]}"


def api(scene: Scene, path: str) -> dict[str, Any]:
    answer: dict[str, Any] = scene.client.get(f"/api/v1/{path}").raise_for_status().json()
    return answer


def in_service(scene: Scene) -> list[dict[str, Any]]:
    return [s for s in api(scene, "status")["streams"] if s["in_service"] and s["method"] != "none"]


def speeds(streams: list[dict[str, Any]]) -> list[float | None]:
    """Of the last five minutes."""
    return [stream["tokens_per_second"]["now"] for stream in streams]


def text_of(page: Page) -> str:
    return " ".join(page.inner_text("main").split())


@pytest.mark.parametrize("name", PAGES)
def test_every_page_fits_and_can_be_read(
    scene: Scene, open_page: Opener, screenshots: Path, name: str
) -> None:
    page = open_page(address(scene, name))
    if name == "running":
        expect(page.locator("#charts .legend li", has_text="held out")).to_have_count(2)
    if name in ("stream", "incident"):
        expect(page.locator("#charts .legend", has_text="baseline").first).to_be_visible()
        expect(page.locator("#marks li", has_text="acceptance fell")).to_be_visible()
    assert 1_000 < page.evaluate(TRANSFERRED) < HEAVIEST_BYTES
    for screen, (colours, width) in SCREENS.items():
        page.emulate_media(color_scheme=colours)
        page.set_viewport_size({"width": width, "height": 900})
        page.screenshot(path=screenshots / f"{name}-{screen.replace(' ', '-')}.png", full_page=True)
        if screen == "light":
            page.screenshot(path=screenshots / f"{name}.png", clip=ABOVE_THE_FOLD)
        looks = page.evaluate(LOOKS)
        assert looks["texts"] > 10
        assert looks["overflowing"] == [], screen
        assert looks["faint"] == [], screen
        assert looks["unreachable"] == [], screen
    if name == "incident":
        page = open_page(address(scene, name), viewport={"width": 390, "height": PHONE_SCREEN})
        expect(page.locator("#charts canvas").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollHeight") <= 3 * PHONE_SCREEN


def test_the_fleet_says_what_the_api_says_the_worst_first(scene: Scene, open_page: Opener) -> None:
    streams: list[dict[str, Any]] = []
    rows: list[str] = []
    while not streams or speeds(streams) != speeds(in_service(scene)):  # a minute may end meanwhile
        streams = in_service(scene)
        page = open_page(address(scene, "fleet"))
        expect(page.get_by_role("heading", level=1)).to_have_text(f"1 of {len(streams)} streams degraded")
        rows = page.locator("[data-live=streams] .fleet tbody tr").all_inner_texts()
    assert len(rows) == len(streams)
    for row, stream in zip(rows, streams, strict=True):
        told = " ".join(row.split())
        assert stream["server"] in told
        assert stream["text"] in told
        for side in ("now", "baseline"):
            rate = stream["acceptance"][side]
            assert (f"{rate['rate']:.3f}" if rate else "–") in told
        speed = stream["tokens_per_second"]["now"]
        assert (f"{speed:,.1f}" if speed else "–") in told
    assert f"{streams[0]['tokens_per_second']['cost_percent']:.1f}%" in rows[0]
    assert "connection refused" in text_of(page)
    assert "step 430 of 1000" in text_of(page)


def test_a_stream_says_what_the_api_says(scene: Scene, open_page: Opener) -> None:
    page = open_page(address(scene, "stream"))
    stream = next(s for s in api(scene, "status")["streams"] if s["id"] == scene.streams["chat-eu-1"])
    told = text_of(page)
    assert stream["text"] in told
    for segment in stream["segments"]:
        row = page.locator("section[data-live=segments] tr", has_text=segment["segment"])
        for side in ("now", "baseline"):
            rate = segment[side]
            expect(row).to_contain_text(f"{rate['rate']:.3f}")
            expect(row).to_contain_text(f"{rate['low']:.3f}–{rate['high']:.3f}")
    tables = page.locator("section[data-live=cost] table")
    choices = tables.nth(0).locator("tbody tr")
    assert choices.count() == len(stream["cost"]["choices"]) > 2
    for row, choice in zip(choices.all(), stream["cost"]["choices"], strict=True):
        expect(row).to_contain_text(f"{choice['tokens_per_second']:,.1f}")
        expect(row).to_contain_text(f"{100 * choice['gain']['value']:.1f}%")
    assert f"{stream['cost']['break_even_acceptance']['value']:.3f}" in told
    loads = tables.nth(1).locator("tbody tr")
    assert loads.count() == len(stream["cost"]["loads"]) == 1
    factor = stream["cost"]["loads"][0]["factor"]
    expect(loads.first).to_contain_text(f"{factor['value']:.2f} {factor['low']:.2f}–{factor['high']:.2f}")
    assert stream["speculation"]["factor"] == factor
    (best,) = [action for action in stream["actions"] if action["best"]]
    marked = page.locator("[data-live=decisions] tr.chosen")
    expect(marked.locator("strong")).to_have_text(best["text"][0].upper() + best["text"][1:])
    drawn = api(scene, f"streams/{stream['id']}/acceptance?minutes=60")
    expect(page.locator("#marks li", has_text="acceptance fell")).to_have_count(len(drawn["change_points"]))
    baseline = page.locator("#charts .legend li", has_text="baseline")
    expect(baseline).to_contain_text(f"{stream['acceptance']['baseline']['rate']:.3f}")
    page.get_by_label("Show").select_option("german")
    german = next(s for s in stream["segments"] if s["segment"] == "german")
    expect(baseline).to_contain_text(f"{german['baseline']['rate']:.3f}")


def test_tokens_that_came_slower_are_not_drawn_as_acceptance_that_rose(
    scene: Scene, open_page: Opener
) -> None:
    def slower(route: Route) -> None:
        answer = route.fetch()
        drawn = answer.json()
        for one in drawn["change_points"]:
            one["direction"] = "slower"
        route.fulfill(response=answer, json=drawn)

    page = open_page(address(scene, "stream"))
    page.route("**/acceptance?*", slower)
    page.reload()
    expect(page.locator("#marks li", has_text="tokens came slower")).to_be_visible()
    expect(page.locator("#marks li", has_text="acceptance")).to_have_count(0)


def test_a_promotion_is_in_the_history_and_in_the_chart(scene: Scene, open_page: Opener) -> None:
    page = open_page(f"{scene.client.base_url}/streams/{scene.streams['batch-1']}")
    gate = api(scene, f"retrain-runs/{scene.done_id}")["numbers"]["gate"]
    new = page.locator("section[data-live=drafts] tr", has_text="from v1")
    expect(new).to_contain_text("in service")
    expect(new).to_contain_text(gate["reason"])
    expect(page.locator("#marks li", has_text="draft v2 put into service")).to_be_visible()


def test_an_incident_says_where_how_bad_why_and_what_to_do(scene: Scene, open_page: Opener) -> None:
    page = open_page(address(scene, "incident"))
    incident = api(scene, f"incidents/{scene.incident_id}")
    told = text_of(page)
    assert incident["summary"] in told
    assert f"{incident['acceptance_before']:.3f} → {incident['acceptance_after']:.3f}" in told
    lost = incident["cost"]["lost"]
    assert f"{100 * lost['low']:.1f}% to {100 * lost['high']:.1f}%" in told
    diagnosis = incident["diagnosis"]
    assert diagnosis["recommended_action"][1:] in told
    assert f"Confidence {diagnosis['confidence']}" in told
    for fact in diagnosis["facts"]:
        row = page.locator("section[data-live=diagnosis] tr", has_text=fact["text"])
        for name, value in fact["numbers"].items():
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            expect(row).to_contain_text(f"{name.replace('_', ' ')} {shown}")
    events = page.locator("[data-live=history] .timeline li").all_inner_texts()
    assert events == sorted(events)  # each begins with its time
    assert {event.split()[3] for event in events} == {"changed", "retraining", "found", "mitigating"}
    moments = [incident["since"], *incident["since_interval"]]
    assert all(f"{datetime.fromisoformat(at):%Y-%m-%d %H:%M:%S} UTC" in told for at in moments)


def test_a_run_says_what_the_gate_decided(scene: Scene, open_page: Opener) -> None:
    page = open_page(address(scene, "done"))
    numbers = api(scene, f"retrain-runs/{scene.done_id}")["numbers"]
    gate, (part,) = numbers["gate"], numbers["watch"]["segments"]
    expect(page.get_by_role("heading", name="Gate: promote")).to_be_visible()
    for group in gate["groups"]:
        row = page.locator("[data-live=gate] tr", has_text=group["group"]).last
        expect(row).to_contain_text(f"{group['accepted_parent']:.3f}")
        low, high = (group["accepted_candidate"] + sign * group["accepted_margin"] for sign in (-1, 1))
        expect(row).to_contain_text(f"{group['accepted_candidate']:.3f} {low:.3f} to {high:.3f}")
        expect(row).to_contain_text(f"{group['parent']:.3f}, then {group['candidate']:.3f}")
        expect(row).to_contain_text(
            f"{group['difference']:+.3f} {group['lower']:+.3f} to {group['upper']:+.3f}"
        )
    (first, _) = gate["groups"]
    half = first["accepted_margin"] * (1 + first["drafted_requests"] / part["requests"]) ** 0.5
    low, high = (first["accepted_candidate"] + sign * half for sign in (-1, 1))
    watched = page.locator("[data-live=watch] tr", has_text="summaries").last
    expect(watched).to_contain_text(f"above the {low:.2f} to {high:.2f} expected")


def test_a_running_training_and_its_curve_move_on_without_a_reload(scene: Scene, open_page: Opener) -> None:
    page = open_page(address(scene, "running"))
    bar, said = page.get_by_role("progressbar"), page.locator("#at-cursor")
    expect(bar).to_have_attribute("value", "430")
    page.locator("#charts").focus()
    page.keyboard.press("End")
    expect(said).to_have_text("Step 430. Loss: training 0.868. Single draft tokens kept: training 0.500")
    report(scene, 500)
    expect(bar).to_have_attribute("value", "500")
    page.wait_for_function("plots[0].data[0].at(-1) === 500")
    page.keyboard.press("End")
    expect(said).to_contain_text("Loss: training 0.843, held out 1.000")
    expect(said).to_contain_text("kept: training 0.500, held out 0.575")
    page.get_by_text("The same numbers as a table").click()
    rows = page.locator("#numbers tbody tr")
    expect(rows).to_have_count(51)
    expect(rows.first).to_contain_text("500")
    report(scene, 510, nonsense=True)
    expect(rows).to_have_count(52)
    expect(
        page.get_by_text("1 report of the training made no sense and is left out; the first: step 3")
    ).to_be_visible()
    report(scene, 430)


def report(scene: Scene, step: int, *, nonsense: bool = False) -> None:
    """As the training does, at this step of 1000; nonsense: then at step 3."""
    progress = {"step": step, "steps": 1000, "loss": 0.9, "acceptance": 0.6}
    curve = running_curve(step, datetime.now(UTC))
    if nonsense:
        curve = with_report(curve, {**progress, "event": "progress", "step": 3}, datetime.now(UTC))
    with scene.database.session() as session:
        retrain_runs.set_progress(session, scene.running_id, progress, curve)


def test_a_page_whose_sidecar_is_gone_or_hangs_says_so_soon(scene: Scene, open_page: Opener) -> None:
    page = open_page(address(scene, "running"), allowed="net::ERR_")
    note, icon = page.locator("#stale"), page.locator("link[rel=icon]")
    colour_of_the_state = icon.get_attribute("href")
    expect(note).to_be_hidden()
    page.route("**/retraining/*", lambda route: route.abort())
    expect(note).to_contain_text("does not answer. Its last answer came at 20", timeout=15_000)
    assert icon.get_attribute("href") != colour_of_the_state
    page.unroute("**/retraining/*")
    expect(note).to_be_hidden()
    assert icon.get_attribute("href") == colour_of_the_state
    waiting: list[Route] = []

    def never_answer(route: Route) -> None:
        waiting.append(route)

    page.route("**/retraining/*", never_answer)
    expect(note).to_be_visible(timeout=15_000)
    assert 1 <= len(waiting) <= 2  # one after the other, not one every two seconds


@pytest.mark.parametrize("status", [500, 404])
def test_a_page_whose_sidecar_answers_with_an_error_says_which(
    scene: Scene, open_page: Opener, status: int
) -> None:
    page = open_page(address(scene, "running"), allowed=f"the server responded with a status of {status}")
    page.route("**/retraining/*", lambda route: route.fulfill(status=status))
    told = f"The sidecar answered with an error, {status}. Its last page came at 20"
    expect(page.locator("#stale")).to_contain_text(told, timeout=15_000)


def test_a_login_that_answers_instead_of_the_sidecar_is_not_taken_for_its_page(
    scene: Scene, open_page: Opener
) -> None:
    """As of a reverse proxy, whose session is over."""
    page = open_page(address(scene, "running"))
    login = "<!doctype html><title>Sign in</title><form><input name=user></form>"
    page.route(
        "**/retraining/*", lambda route: route.fulfill(status=200, body=login, content_type="text/html")
    )
    told = "Another page answers, such as a login. The last one of the sidecar came at 20"
    expect(page.locator("#stale")).to_contain_text(told, timeout=15_000)
    assert "retraining of" in page.title()
    assert "%236b7280" in str(page.locator("link[rel=icon]").get_attribute("href"))
    expect(page.get_by_role("progressbar")).to_be_visible()


def test_cards_come_and_go_on_an_open_page(
    guarded: httpx.Client, database: Database, open_page: Opener
) -> None:
    stream_id = add_stream(database)
    page = open_page(f"{guarded.base_url}/streams/{stream_id}")
    why = page.get_by_role("heading", name="Why", exact=True)
    cards = page.locator("main > section h2")
    before = cards.all_inner_texts()
    expect(why).to_have_count(0)
    incident_id = add_incident(database, [], stream_id=stream_id)
    page.evaluate("look()")
    expect(why).to_be_visible()
    assert cards.all_inner_texts() == [*before[:1], "Why", *before[1:]], (
        "at another place than after a reload"
    )
    resolve(database, incident_id)
    page.evaluate("look()")
    expect(why).to_have_count(0)
    assert cards.all_inner_texts() == before


def test_an_incident_that_is_over_leaves_no_buttons_on_an_open_page(
    database: Database, tmp_path: Path, open_page: Opener
) -> None:
    """Of a server that is none of the engines in the settings."""
    incident_id = add_incident(database, [])
    alone = Settings(data_dir=tmp_path)
    with serving(create_app(Sidecar(alone, database, "http://sidecar"))) as client:
        page = open_page(f"{client.base_url}/incidents/{incident_id}")
        page.get_by_label("Reason").fill("it is over")
        page.get_by_role("button", name="Resolve").click()
        expect(page.locator("#decide [role=status]")).to_have_text("The incident is resolved.")
        expect(page.locator("#decide button")).to_have_count(0)
        expect(page.get_by_label("Reason")).to_be_hidden()


def test_charts_share_their_zoom_and_their_address_shows_the_same(scene: Scene, open_page: Opener) -> None:
    page = open_page(f"{address(scene, 'stream')}?minutes=360", timezone_id="Asia/Kolkata")
    charts, reset = page.locator("#charts"), page.get_by_role("button", name="Reset zoom")
    figures = page.locator("#charts figure")
    expect(figures).to_have_count(6)
    expect(page.locator("#charts .missing:visible")).to_have_count(0)
    whole = shown_range(page)
    assert len(set(whole)) == 1
    stream = f"streams/{scene.streams['chat-eu-1']}"
    first = min(
        p["at"] for line in api(scene, f"{stream}/acceptance?minutes=360")["lines"] for p in line["points"]
    )
    assert whole[0][0] == datetime.fromisoformat(first).timestamp()  # no empty stretch before the data
    page.locator("#charts .u-over").nth(2).scroll_into_view_if_needed()
    box = page.locator("#charts .u-over").nth(2).bounding_box()
    assert box
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 30, steps=4)
    page.mouse.up()
    expect(reset).to_be_visible()
    expect(charts).to_have_attribute("data-bin-seconds", re.compile("^(5|10)$"))  # finer than of six hours
    expect(page.locator("#marks")).to_contain_text("acceptance fell")
    zoomed = shown_range(page)
    assert len(set(zoomed)) == 1
    assert whole[0][0] < zoomed[0][0] < zoomed[0][1] < whole[0][1]
    page.get_by_label("Show").select_option("german")
    other = open_page(page.url)
    expect(other.locator("#charts .legend", has_text="german").first).to_be_visible()
    assert shown_range(other)[0] == pytest.approx(zoomed[0], abs=0.01)
    expect(other.get_by_label("Show")).to_have_value("german")
    charts.focus()
    page.keyboard.press("Escape")
    expect(charts).to_have_attribute("data-bin-seconds", "300")
    expect(reset).to_be_hidden()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    said = page.locator("#at-cursor")
    for words in (
        "UTC",
        "Acceptance: german 0.",
        "Acceptance length:",
        "position 4",
        "Volume: requests",
        "K:",
    ):
        expect(said).to_contain_text(words)
    at = datetime.strptime(said.inner_text()[:19], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
    lines = api(scene, f"{stream}/acceptance?minutes=360")["lines"]
    (line,) = [line for line in lines if line["segment"] == "german"]
    (point,) = [point for point in line["points"] if datetime.fromisoformat(point["at"]) == at]
    expect(said).to_contain_text(f"tokens per step {point['acceptance_length']:.2f}")
    page.get_by_text("The same numbers as a table").click()
    row = page.locator("#numbers tbody tr", has_text=f"{at:%Y-%m-%d %H:%M:%S} UTC")
    rates = (point["acceptance"], *point["acceptance_per_position"])
    for rate in rates:
        expect(row).to_contain_text(f"{rate:.3f}")
    page.get_by_role("button", name="Times: UTC").click()
    local = at.astimezone(timezone(timedelta(hours=5, minutes=30)))
    row = page.locator("#numbers tbody tr", has_text=f"{local:%Y-%m-%d %H:%M:%S} UTC+05:30")
    expect(row).to_contain_text(f"{point['acceptance']:.3f}")
    page.goto(address(scene, "fleet"))
    expect(page.locator("footer")).to_contain_text("UTC+05:30")


def test_the_address_of_an_incident_shows_all_segments_where_they_are_chosen(
    scene: Scene, open_page: Opener
) -> None:
    page = open_page(address(scene, "incident"))
    segment = page.get_by_label("Show")
    expect(segment).to_have_value("german")
    segment.select_option("")
    expect(page.locator("#charts .legend", has_text="all segments").first).to_be_visible()
    other = open_page(page.url)
    expect(other.locator("#charts .legend", has_text="all segments").first).to_be_visible()
    expect(other.get_by_label("Show")).to_have_value("")


def test_a_segment_with_spaces_in_its_name_is_drawn(
    guarded: httpx.Client, database: Database, open_page: Opener
) -> None:
    """HTML reads the text of an option without them."""
    name, now = " support  de", datetime.now(UTC)
    with database.session() as session:
        key = create_key(session, "operator")
    sent = [msgspec.structs.replace(one, ended_at=now) for one in Traffic(seed=93).draw(3, {name: 0.7})]
    guarded.headers["Authorization"] = f"Bearer {key}"
    post(guarded, sent)
    wait_until(lambda: guarded.get("/api/v1/streams/1").json()["segments"] != [], "the fold")
    page = open_page(f"{guarded.base_url}/streams/1?minutes=60")
    page.get_by_label("Show").select_option(index=1)
    expect(page.locator("#charts figure").first).to_be_visible()
    expect(page.locator("#no-data")).to_be_hidden()
    assert page.evaluate("chosen.value") == name


def test_a_segment_with_a_long_name_fits_a_phone(
    guarded: httpx.Client, database: Database, open_page: Opener
) -> None:
    """As of proxy.segment_from = "path"."""
    with database.session() as session:
        key = create_key(session, "operator")
    names = {"/v1/projects/north-sea/deployments/assistant_of_customer_service": 0.7, "default": 0.6}
    now = datetime.now(UTC)
    drawn = Traffic(seed=94).draw(6, names)
    guarded.headers["Authorization"] = f"Bearer {key}"
    post(guarded, [msgspec.structs.replace(one, ended_at=now) for one in drawn])
    wait_until(lambda: guarded.get("/api/v1/streams/1").json()["segments"] != [], "the fold")
    page = open_page(f"{guarded.base_url}/streams/1", viewport={"width": 390, "height": PHONE_SCREEN})
    expect(page.locator("#charts .legend", has_text="north-sea").first).to_be_visible()
    assert page.evaluate(LOOKS)["overflowing"] == []


def shown_range(page: Page) -> list[tuple[float, float]]:
    """Of the time axis of each chart, seconds."""
    page.wait_for_selector("#charts[data-bin-seconds]")
    ranges = page.evaluate("plots.map((plot) => [plot.scales.x.min, plot.scales.x.max])")
    return [(low, high) for low, high in ranges]


def test_charts_that_cannot_be_drawn_say_so(scene: Scene, open_page: Opener) -> None:
    page = open_page(address(scene, "runbook"))
    page.route("**/uPlot.js", lambda route: route.fulfill(content_type="text/javascript", body=""))
    page.goto(address(scene, "stream"))
    expect(page.get_by_text("The charts cannot be drawn: uPlot")).to_be_visible()


def test_charts_whose_numbers_cannot_be_read_say_so_although_the_page_can(
    guarded: httpx.Client, database: Database, open_page: Opener
) -> None:
    incident_id = add_incident(database, [])
    page = open_page(f"{guarded.base_url}/configuration", allowed="the server responded with")
    page.route("**/acceptance?*", lambda route: route.fulfill(status=503, json={"detail": "too busy"}))
    page.goto(f"{guarded.base_url}/incidents/{incident_id}")
    told = page.locator("#not-read")
    expect(told).to_have_text("The charts could not be brought up to date: too busy")
    expect(page.locator("#stale")).to_be_hidden()
    page.unroute("**/acceptance?*")
    expect(told).to_be_hidden(timeout=15_000)  # with the next look


def test_settings_that_are_unfolded_stay_so(guarded: httpx.Client, open_page: Opener) -> None:
    page = open_page(f"{guarded.base_url}/configuration")
    setting = page.get_by_text("detection.false_alarm_days", exact=True)
    expect(setting).to_be_hidden()
    page.get_by_text("settings with their defaults").click()
    expect(setting).to_be_visible()
    page.evaluate("look()")
    expect(setting).to_be_visible()


def test_without_javascript_everything_but_deciding_is_there(scene: Scene, open_page: Opener) -> None:
    incident = api(scene, f"incidents/{scene.incident_id}")
    wanted = {
        "fleet": "acceptance in german fell",
        "stream": "acceptance in german fell",
        "incident": incident["summary"],
        "retraining": "step 430 of 1000",
        "done": "Gate: promote",
    }
    page = open_page(address(scene, "fleet"), java_script_enabled=False)
    for name, sentence in wanted.items():
        page.goto(address(scene, name))
        assert sentence in text_of(page)
        assert re.search(r'<meta http-equiv="refresh" content="\d+">', page.content())
        assert page.locator("button:not(form button):visible").count() == 0
        if name == "incident":
            expect(page.locator("#decide noscript p")).to_be_visible()
            expect(page.locator("#key, #reason").first).to_be_hidden()


def test_the_keyboard_reaches_everything_in_order_and_enter_works(scene: Scene, open_page: Opener) -> None:
    page = open_page(address(scene, "stream"))
    expect(page.locator("#charts canvas").first).to_be_visible()
    wanted = page.evaluate(f"{FOCUSABLE}.length")
    assert wanted > 14
    focused = f"{FOCUSABLE}.indexOf(document.activeElement)"
    outline = "parseFloat(getComputedStyle(document.activeElement).outlineWidth)"
    for place in range(wanted):
        page.keyboard.press("Tab")
        assert page.evaluate(focused) == place
        assert page.evaluate(outline) >= 2
    hours = page.get_by_role("button", name="6 hours")
    hours.focus()
    with page.expect_response("**/acceptance?minutes=360"):
        page.keyboard.press("Enter")
    expect(hours).to_have_attribute("aria-pressed", "true")
    page.get_by_role("link", name="Skip to the content").focus()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()


@pytest.fixture
def guarded(database: Database, tmp_path: Path) -> Iterator[httpx.Client]:
    """A sidecar that others can reach, so that writing needs a key; the engine of `chat` is away."""
    with serving(create_app(Sidecar(settings(tmp_path, "0.0.0.0"), database, "http://sidecar"))) as client:
        yield client


def test_deciding_needs_a_key_and_a_reason_and_says_so(
    guarded: httpx.Client, database: Database, open_page: Opener
) -> None:
    incident_id = add_incident(database, [])
    with database.session() as session:
        key = create_key(session, "operator")
    page = open_page(f"{guarded.base_url}/incidents/{incident_id}", allowed="the server responded with")
    said, reason = page.locator("#decide [role=status]"), page.get_by_label("Reason")
    acknowledge = page.get_by_role("button", name="Acknowledge")
    acknowledge.click()
    expect(said).to_have_text("API key needed: this call needs an API key: Authorization: Bearer KEY")
    page.get_by_label("API key").fill("wrong")
    acknowledge.click()
    expect(said).to_have_text("API key needed: this API key is unknown or revoked")
    page.get_by_label("API key").fill(key)
    acknowledge.click()
    expect(said).to_contain_text("reason")
    reason.fill("looking at it")
    acknowledge.focus()
    page.keyboard.press("Enter")
    expect(said).to_have_text("The incident is acknowledged.")
    expect(acknowledge).to_have_count(0)
    expect(page.locator("[data-live=history]")).to_contain_text("looking at it")
    page.get_by_role("button", name="Accept the new level").click()
    expect(said).to_have_text("The incident is resolved.")
    assert guarded.get(f"/api/v1/incidents/{incident_id}").json()["level_accepted"]
    expect(page.locator("[data-live=decisions] button")).to_have_text(["Retrain now"])


def test_a_decision_without_an_answer_may_have_been_taken(
    guarded: httpx.Client, database: Database, open_page: Opener
) -> None:
    """A rollback waits for its engine for minutes, a proxy in front of the sidecar for one."""
    incident_id = add_incident(database, [])
    page = open_page(f"{guarded.base_url}/incidents/{incident_id}", allowed="the server responded with")
    page.route("**/acknowledge", lambda route: route.fulfill(status=504, body="<h1>Gateway Time-out</h1>"))
    page.get_by_role("button", name="Acknowledge").click()
    expect(page.locator("#decide [role=status]")).to_have_text(
        "No answer of the sidecar: HTTP 504, as of a proxy in front of it. It may be done all the same: look "
        "before you repeat it."
    )


def test_retraining_and_rolling_back_tell_what_came_of_it(
    guarded: httpx.Client, database: Database, open_page: Opener
) -> None:
    incident_id, now = add_incident(database, []), datetime.now(UTC)
    with database.session() as session:
        key = create_key(session, "operator")
        draft = Draft(
            server="chat",
            target="target",
            version="v1",
            name="v1",
            method="draft_model",
            directory="/drafts/v1",
            parent_version="v0",
            state="in_service",
            created_at=now,
            promoted_at=now,
        )
        session.add(draft)
        for number in range(20):  # tried since, and rejected
            later = {"created_at": now + timedelta(days=number), "state": "rejected"}
            place = {"server": "chat", "target": "target", "method": "draft_model", "name": ""}
            session.add(Draft(**place, **later, version=f"n{number}"))
    page = open_page(f"{guarded.base_url}/incidents/{incident_id}", allowed="the server responded with")
    said, roll_back = (
        page.locator("#decide [role=status]"),
        page.get_by_role("button", name="Roll back to draft v0"),
    )
    expect(page.get_by_text("nothing to roll back to")).to_have_count(0)
    page.get_by_label("Reason").fill("it loops")
    roll_back.click()
    expect(said).to_contain_text("API key needed")
    page.get_by_label("API key").fill(key)
    roll_back.click()
    expect(said).to_contain_text("Engine refused: the engine at http://127.0.0.1:9 cannot be reached")
    page.get_by_role("button", name="Retrain the draft").click()
    expect(said).to_have_text("A retraining is queued; its run appears under Retraining.")
    asked = {"server": "chat", "draft_version": "v0", "awaited": True}
    page.route("**/rollback", lambda route: route.fulfill(json=asked))
    roll_back.click()
    expect(said).to_have_text("The server was told to serve draft v0; its records are awaited.")


def test_a_stream_that_was_set_aside_is_tried_again_by_a_button(
    guarded: httpx.Client, database: Database, open_page: Opener
) -> None:
    incident_id, now = add_incident(database, []), datetime.now(UTC)
    with database.session() as session:
        key = create_key(session, "operator")
        stream_id = session.scalars(select(Incident.stream_id).where(Incident.id == incident_id)).one()
        held = {"failures": 5, "reason": "planted", "version": VERSION, "since": now, "set_aside_at": now}
        folding.hold_stream(session, stream_id, {**held, "after_seq": 0, "records_behind": 0})
    page = open_page(f"{guarded.base_url}/streams/{stream_id}", allowed="the server responded with")
    expect(page.locator("main")).to_contain_text("Cannot be judged since")
    again = page.get_by_role("button", name="Try its records again")
    again.click()
    expect(page.locator("#decide [role=status]")).to_contain_text("API key needed")
    page.get_by_label("API key").fill(key)
    again.click()
    expect(page.locator("#decide [role=status]")).to_have_text("Its records are read again within seconds.")
    expect(again).to_have_count(0, timeout=15_000)


def test_two_hundred_streams_fit_in_lines_of_their_own(
    guarded: httpx.Client, database: Database, open_page: Opener
) -> None:
    now = datetime.now(UTC)
    with database.session() as session:
        for number in range(200):
            names = {"server": f"chat-{number}", "target": "Qwen3-32B", "draft": "Qwen3-0.6B"}
            session.add(
                Stream(**names, draft_version="v1", method="eagle3", first_seen_at=now, last_seen_at=now)
            )
    page = open_page(f"{guarded.base_url}/")
    rows = page.locator(".fleet tbody tr")
    expect(rows).to_have_count(100)
    assert max(row.bounding_box()["height"] for row in rows.all()[:20]) <= 75  # type: ignore[index]
    first = set(rows.locator("th a").all_inner_texts())
    page.get_by_role("link", name="Next 100").click()
    expect(rows.first.locator("th a")).not_to_have_text(min(first))
    assert first | set(rows.locator("th a").all_inner_texts()) == {f"chat-{number}" for number in range(200)}
    search = page.get_by_text("Search, filter, order, group")
    for width in (1280, 390):  # what the page is for comes first
        page.set_viewport_size({"width": width, "height": 900})
        headline, folded = page.locator("h1").bounding_box(), search.bounding_box()
        assert headline
        assert folded
        assert headline["y"] < folded["y"]
        expect(page.get_by_label("Group by")).to_be_hidden()
    search.click()
    page.locator("select[name=view]").select_option("wall")
    page.get_by_label("Group by").select_option("target")
    page.get_by_role("button", name="Show").click()
    expect(page.locator(".wall li")).to_have_count(200)
    expect(page.get_by_label("Group by")).to_be_visible()
    expect(page.locator(".group")).to_have_text("Qwen3-32B 200 streams")
    assert "view=wall" in page.url
    page.locator("select[name=view]").select_option("table")
    page.get_by_label("Search").fill("CHAT-17")
    page.get_by_role("button", name="Show").click()
    expect(rows).to_have_count(11)

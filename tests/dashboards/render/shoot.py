"""Dashboards as pictures: a headless Chromium draws each on one page, from what Prometheus answers."""

from __future__ import annotations

import io
import json
import mimetypes
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from PIL import Image
from playwright.sync_api import Browser, Page, Route, sync_playwright

from tests.dashboards.render.scene import Recording

HERE: Final = Path(__file__).parent
CHROMIUM: Final = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
ORIGIN: Final = "http://dashboards.invalid"  # nothing listens there: every request is answered from the disk
PLACES: Final = {
    "/public/build/img/": HERE / "node_modules/@grafana/ui/dist/public/img",
    "/public/img/": HERE / "node_modules/@grafana/ui/dist/public/img",
    "/main.": HERE / "build",
    "/": HERE / "page",
}
WIDTH: Final = 1400
COLOURS: Final = 256
SETTLE_MS: Final = 1_500  # for icons and the last layout


def shoot(
    dashboards: Mapping[str, dict[str, Any]],
    values: Mapping[str, Mapping[str, str]],
    prometheus_url: str,
    recording: Recording,
    directory: Path,
) -> None:
    """Writes `uid`.png of each dashboard. `values`: uid -> what is chosen in its variables; all elsewhere.

    Raises RuntimeError where there is no Chromium, or where a page complains.
    """
    if CHROMIUM is None:
        raise RuntimeError("no chromium on the PATH; on Debian: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--disable-gpu"])
        for uid, dashboard in dashboards.items():
            scene = {
                "dashboard": dashboard,
                "values": values.get(uid, {}),
                "range": {"start": recording.start, "end": recording.end},
            }
            path = directory / f"dashboard-{uid.removeprefix('driftguard-')}.png"
            path.write_bytes(_small(_drawn(browser, scene, prometheus_url)))
            print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
        browser.close()


def _drawn(browser: Browser, scene: Mapping[str, Any], prometheus_url: str) -> bytes:
    page = browser.new_page(viewport={"width": WIDTH, "height": 1000})
    complaints = _complaints(page)
    page.route(f"{ORIGIN}/**", _from_disk)
    page.route(f"{ORIGIN}/api/**", lambda route: _from_prometheus(route, prometheus_url))
    page.goto(f"{ORIGIN}/index.html")
    page.evaluate("scene => window.draw(scene)", json.loads(json.dumps(scene)))
    page.wait_for_selector("main")
    height = page.evaluate("document.documentElement.scrollHeight")
    page.set_viewport_size({"width": WIDTH, "height": height})  # a table draws only what can be seen
    page.wait_for_timeout(SETTLE_MS)
    if complaints:
        raise RuntimeError("\n".join(complaints))
    picture = page.screenshot()
    page.close()
    return picture


def _complaints(page: Page) -> list[str]:
    found: list[str] = []
    page.on("console", lambda message: found.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("requestfailed", lambda request: found.append(f"{request.url} failed: {request.failure}"))
    return found


def _from_disk(route: Route) -> None:
    path = urlsplit(route.request.url).path
    if path.startswith("/public/fonts/"):
        route.fulfill(path=_font())  # Grafana's is not in its packages
        return
    start, directory = next(item for item in PLACES.items() if path.startswith(item[0]))
    file = directory / (path.removeprefix(start) if start.endswith("/") else path.removeprefix("/"))
    if file.is_file():
        route.fulfill(path=file, content_type=mimetypes.guess_type(file.name)[0])
    else:
        route.fulfill(status=404, body=f"{file} is not there")


@cache
def _font() -> str:
    """One of this machine, by fontconfig, which Chromium needs as well."""
    command = ["fc-match", "--format=%{file}", "Arial"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _from_prometheus(route: Route, url: str) -> None:
    """Requested from Python: a browser does not let a page of another origin request loopback."""
    asked = urlsplit(route.request.url)
    route.fulfill(response=route.fetch(url=f"{url}{asked.path}?{asked.query}"))


def _small(png: bytes) -> bytes:
    """The same picture in its most frequent colours, so that a line keeps the colour of its legend."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    counted = picture.getcolors(picture.width * picture.height) or []
    frequent = [colour for _, colour in sorted(counted, reverse=True)[:COLOURS]]
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for colour in frequent for part in colour])
    few = picture.quantize(palette=palette, dither=Image.Dither.NONE)
    written = io.BytesIO()
    few.save(written, "PNG", optimize=True)
    return written.getvalue()

"""`make page-screenshots`: plays `driftguard demo --keep`, and takes pictures of its pages in a browser."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import httpx
from playwright.sync_api import sync_playwright

PICTURES: Final = Path(__file__).parents[2] / "docs" / "screenshots"
WIDTH: Final = 1280
HEIGHTS: Final = {"fleet": 640, "incident": 1_180, "run": 1_506, "stream": 1_790}  # of what is to be seen
SETTLE_MS: Final = 3_000  # for charts, and for the newest numbers


def main() -> None:
    command = [sys.executable, "-u", "-m", "driftguard", "demo", "--keep", *sys.argv[1:]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        url, is_training, has_ended = "", False, False
        for line in demo.stdout:
            print(line, end="")
            if found := re.search(r"status page: (http://[^/ ]+)", line):
                url = found[1]
            if "retraining: training" in line and not is_training:
                is_training = True
                _shoot({"fleet": url})
            if "the draft was swapped under traffic" in line:
                has_ended = True
                break
        try:
            if not has_ended:
                raise SystemExit("the demo has not come to its end")
            _shoot(_pages(url))
        finally:
            demo.send_signal(signal.SIGTERM)
            demo.stdout.read()


def _pages(url: str) -> Mapping[str, str]:
    """Picture -> address."""
    with httpx.Client(base_url=f"{url}/api/v1") as sidecar:
        incident = sidecar.get("/incidents").json()["incidents"][0]
        run = sidecar.get("/retrain-runs").json()["runs"][0]
    return {
        "incident": f"{url}/incidents/{incident['id']}",
        "run": f"{url}/retraining/{run['id']}",
        "stream": f"{url}/streams/{incident['stream']['id']}?minutes=15",
    }


def _shoot(pages: Mapping[str, str]) -> None:
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--disable-gpu"])
        for name, address in pages.items():
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHTS[name]})
            page.goto(address)
            page.wait_for_timeout(SETTLE_MS)
            page.screenshot(path=PICTURES / f"{name}.png")
            print(f"{name}: {address}")
        browser.close()


if __name__ == "__main__":
    main()

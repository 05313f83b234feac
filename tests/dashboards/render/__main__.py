"""`make dashboard-screenshots`: plays a scene, draws the dashboards from it, and stores the pictures."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Final

import httpx

from driftguard.demo.processes import SERVER
from tests.dashboards.committed import DASHBOARDS
from tests.dashboards.render.scene import Recording, record
from tests.dashboards.render.shoot import shoot
from tests.integration.servers import running_prometheus

PICTURES: Final = Path(__file__).parents[3] / "docs" / "screenshots"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.dashboards.render", description=__doc__)
    parser.add_argument("--recording", type=Path, help="Keep the scene here; drawn again if it is there.")
    parser.add_argument("--output", type=Path, default=PICTURES)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.recording or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        known = directory / "recording.json"
        recording = Recording(**json.loads(known.read_text())) if known.exists() else record(directory)
        with running_prometheus(directory / "prometheus", []) as prometheus:
            values = {"driftguard-stream": {"server": SERVER, "target": _target(prometheus.url, recording)}}
            shoot(DASHBOARDS, values, prometheus.url, recording, arguments.output)


def _target(url: str, recording: Recording) -> str:
    """The target of the server that is shown."""
    parameters = {
        "match[]": f'driftguard_stream_verdict{{server="{SERVER}"}}',
        "start": str(recording.start),
        "end": str(recording.end),
    }
    (target,) = httpx.get(f"{url}/api/v1/label/target/values", params=parameters).json()["data"]
    return str(target)


if __name__ == "__main__":
    main()

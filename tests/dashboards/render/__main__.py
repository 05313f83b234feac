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
from tests.dashboards.render.fleet import record_fleet
from tests.dashboards.render.scene import Recording, record
from tests.dashboards.render.shoot import shoot
from tests.integration.servers import running_prometheus

PICTURES: Final = Path(__file__).parents[3] / "docs" / "screenshots"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.dashboards.render", description=__doc__)
    parser.add_argument("--recording", type=Path, help="Keep the scene here; drawn again if it is there.")
    parser.add_argument("--output", type=Path, default=PICTURES)
    parser.add_argument(
        "--servers", type=int, help="Instead of the scene a sidecar with so many, 0 too; --output is needed."
    )
    arguments = parser.parse_args()
    if arguments.servers is not None and arguments.output == PICTURES:
        parser.error("--output is needed: the pictures of the documentation are of the scene")
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.recording or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        known = directory / "recording.json"
        if known.exists():
            recording = Recording(**json.loads(known.read_text()))
        else:
            recording = _recorded(directory, arguments.servers)
            known.write_text(json.dumps({"start": recording.start, "end": recording.end}))
        with running_prometheus(directory / "prometheus", []) as prometheus:
            server = SERVER if arguments.servers is None else "chat-000"
            values = {
                "driftguard-stream": {"server": server, "target": _target(prometheus.url, server, recording)}
            }
            shoot(DASHBOARDS, values, prometheus.url, recording, arguments.output)


def _recorded(directory: Path, servers: int | None) -> Recording:
    return record(directory) if servers is None else record_fleet(directory, servers)


def _target(url: str, server: str, recording: Recording) -> str:
    """The target of the server that is shown; empty where there is no server, as in Grafana."""
    parameters = {
        "match[]": f'driftguard_stream_verdict{{server="{server}"}}',
        "start": str(recording.start),
        "end": str(recording.end),
    }
    found = httpx.get(f"{url}/api/v1/label/target/values", params=parameters).json()["data"]
    return str(found[0]) if found else ""


if __name__ == "__main__":
    main()

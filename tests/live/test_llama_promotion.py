"""A draft that the sidecar trained goes into a real llama-server by the guide's command, and out again."""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
from driftguard_training.corpus import prompts

from driftguard.records import AcceptanceRecord
from driftguard.records.documents.retraining_run import Comparison
from tests.alerting.http_receiver import wait_until
from tests.live import clients, predicted
from tests.live.predicted import TokenIds
from tests.live.processes import Proxy, Sidecar, of_all, proxy, sidecar
from tests.live.servers import DRAFT, TARGET, Engine, K, llama_server, needs_llama

pytestmark = [needs_llama, pytest.mark.live, pytest.mark.timeout(900)]

GUIDE = Path(__file__).parents[2] / "docs" / "nightly-retraining.md"
TRAINING_SECONDS = 600.0
REQUESTS = 240
SEGMENT = "headers"
SEED = 1


@dataclass
class Serving:
    """llama-server and the proxy in front of it. `drafts`: what is /srv/drafts in the guide."""

    llama: Engine
    beside: Sidecar
    drafts: Path
    order: Path
    temperature: float
    texts: Iterator[str]
    running: ExitStack = field(default_factory=ExitStack)

    def start(self) -> None:
        self.running.callback(self.llama.stop)
        self.llama.start()
        name, _, version = (self.drafts / "proxy.env").read_text().strip().partition("=")
        assert name == "DRIFTGUARD_PROXY__DRAFT_VERSION"
        options = ["--server", "real", "--draft", "small", "--method", "draft_model"]
        options += ["--draft-version", version, "--num-speculative-tokens", str(K)]
        self.proxy: Proxy = self.running.enter_context(
            proxy(self.drafts, self.llama.url, self.beside.url, *options)
        )

    def restart(self) -> None:
        """What the order asks systemd for."""
        wait_until(lambda: bool(run(self.beside)) and self.order.exists(), "the order", TRAINING_SECONDS)
        self.running.close()
        self.start()
        self.order.unlink()
        self.order.with_suffix(".done").touch()

    def ask(self, requests: int = REQUESTS) -> list[TokenIds]:
        """Returns what was served."""
        texts = itertools.islice(self.texts, requests)
        served = [
            clients.with_token_ids(self.proxy.url, text, SEGMENT, temperature=self.temperature)
            for text in texts
        ]
        self.proxy.wait_sent(requests)
        return served


def capture(served: TokenIds, rng: random.Random) -> dict[str, Any]:
    """`rng`: of the id, which decides whether it is held out."""
    prompt, output = served
    return {
        "record_id": str(UUID(int=rng.getrandbits(128), version=4)),
        "server": "real",
        "target": clients.MODEL,
        "draft_version": "v1",
        "segment": SEGMENT,
        "captured_at": datetime.now(UTC).isoformat(),
        "prompt_token_ids": prompt,
        "output_token_ids": output,
    }


@pytest.fixture(params=[0.0, 1.0], ids=["greedy", "sampled"])
def serving(
    converted: tuple[Path, Path], database_url: str, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Serving]:
    target, draft = converted
    drafts, order = tmp_path / "drafts", tmp_path / "order.json"
    drafts.mkdir()
    (drafts / "current.gguf").symlink_to(draft)
    (drafts / "proxy.env").write_text("DRIFTGUARD_PROXY__DRAFT_VERSION=v1\n")
    llama = llama_server(target, drafts / "current.gguf", tmp_path)
    texts = iter(prompts(SEGMENT, 3 * REQUESTS, seed=SEED, characters=clients.CHARACTERS))
    command = guides_command(drafts, order, tmp_path / "promote.sh")
    with sidecar(tmp_path / "sidecar", database_url, settings(command)) as beside:
        found = Serving(llama, beside, drafts, order, request.param, texts)
        with found.running:
            found.start()
            yield found


def test_a_draft_is_trained_converted_promoted_and_rolled_back(serving: Serving, tmp_path: Path) -> None:
    beside, rng = serving.beside, random.Random(SEED)
    captures = [capture(one, rng) for one in serving.ask()]
    sent = beside.client.post("/api/v1/captures", json=captures)
    assert sent.json() == {"accepted": REQUESTS, "duplicates": 0}
    asked = beside.client.post("/api/v1/retrain", json={"server": "real", "force": True})
    assert asked.status_code == 202, asked.text
    serving.restart()
    served = serving.ask()
    wait_until(lambda: run(beside)["state"] == "watching", "records of the new draft")
    version, gate = run(beside)["candidate_version"], run(beside)["numbers"]["gate"]
    gain = msgspec.convert(gate["gain"], Comparison)
    before, after = acceptance(beside, "v1"), acceptance(beside, version)
    low, high = gain.expected_range(live_requests=REQUESTS) or (0.0, 0.0)
    of_same = predicted.acceptance(
        served, tmp_path / "sidecar" / "data" / "drafts" / version, serving.temperature, tmp_path
    )
    print(
        f"temperature {serving.temperature}: {before:.3f}, then {gain.accepted_candidate:.3f} expected "
        f"by {gain.requests} others ({low:.3f} to {high:.3f} of {REQUESTS} live ones), {of_same:.3f} by the "
        f"same, live {after:.3f}"
    )
    assert after > 1.2 * before
    assert low <= after <= high
    assert abs(of_same - after) < (0.005 if serving.temperature == 0.0 else 0.03)

    wanted = {"server": "real", "draft_version": version, "reason": "answers loop"}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(beside.client.post, "/api/v1/rollback", json=wanted, timeout=120.0)
        serving.restart()
        assert answer.result().json() == {"server": "real", "draft_version": "v1"}
    serving.ask(1)
    wait_until(lambda: run(beside)["state"] == "rolled_back", "records of the old draft")


def guides_command(drafts: Path, order: Path, script: Path) -> Path:
    """The guide's script for llama.cpp, with the paths of this test."""
    (found,) = re.findall(
        r"^llama\.cpp, started with.*?```bash\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL
    )
    for theirs, ours in {
        "/srv/drafts": str(drafts),
        "python3 /opt/llama.cpp/convert_hf_to_gguf.py": f"{sys.executable} -m tests.live.to_gguf",
        "systemctl restart llama-server driftguard-proxy": f"{sys.executable} -m tests.live.order {order}",
    }.items():
        assert theirs in found
        found = found.replace(theirs, ours)
    script.write_text(found)
    script.chmod(0o755)
    return script


def settings(command: Path) -> str:
    return f"""
[[engines]]
server = "real"
target_directory = "{TARGET}"
draft_directory = "{DRAFT}"
num_speculative_tokens = {K}
acceptance_rule = "match"
[probes]
enabled = false
[capture]
enabled = true
[retraining]
steps = 80
threads = 1
promote_command = {json.dumps([str(command)])}
"""


def run(beside: Sidecar) -> dict[str, Any]:
    """The newest retraining; nothing before there is one."""
    newest: dict[str, Any] = next(iter(beside.get("retrain-runs")["runs"]), {})
    assert newest.get("state") not in ("rejected", "failed"), newest["reason"]
    return newest


def acceptance(beside: Sidecar, version: str) -> float:
    counts = of_all(drafting(beside, version))
    return counts["accepted"] / counts["drafted"]


def drafting(beside: Sidecar, version: str) -> list[AcceptanceRecord]:
    return [one for one in beside.records() if one.draft_version == version and one.drafted]

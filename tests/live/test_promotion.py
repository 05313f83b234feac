"""A draft that the sidecar trained goes into a real server behind the proxy by the guide's command, and out
again."""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from tests.live import clients, predicted, test_llama_server, test_vllm_server
from tests.live.predicted import TokenIds
from tests.live.processes import Proxy, Sidecar, of_all, proxy, sidecar
from tests.live.servers import (
    DRAFT,
    TARGET,
    Engine,
    K,
    llama_server,
    needs_llama,
    needs_vllm,
    speculative_config,
    vllm_server,
)

pytestmark = [pytest.mark.live, pytest.mark.timeout(1_800)]

GUIDE = Path(__file__).parents[2] / "docs" / "nightly-retraining.md"
TRAINING_SECONDS, RESTART_SECONDS = 600.0, 300.0
REQUESTS = 240
SEGMENT = "headers"
SEED = 1


@dataclass(frozen=True)
class Kind:
    """What differs between engines. `counts`: those that its answers tell exactly."""

    ask: Callable[..., TokenIds]
    own_counts: Callable[[Engine], Mapping[str, int]]
    counts: Sequence[str]
    section: str  # how the sentence above its script begins in the guide
    commands: Mapping[str, str]  # of that script, to the modules of tests.live that run instead
    unseen: float  # how far drafts behind the end of an answer, which it does not show, may move acceptance


KINDS = {
    "llama": Kind(
        clients.with_token_ids,
        test_llama_server.own_counts,
        ("drafted", "accepted"),
        "llama.cpp, started with",
        {
            "python3 /opt/llama.cpp/convert_hf_to_gguf.py": "to_gguf",
            "systemctl restart llama-server driftguard-proxy": "order {order}",
        },
        0.005,
    ),
    "vllm": Kind(
        clients.with_token_ids_of_vllm,
        test_vllm_server.own_counts,
        ("steps", "drafted", "accepted", *(f"accepted@{place}" for place in range(K))),
        "systemd, where vLLM's",
        {"systemctl restart vllm driftguard-proxy": "order {order}"},
        0.02,
    ),
}


@dataclass
class Serving:
    """An engine and the proxy in front of it. `drafts`: what is /srv/drafts in the guide."""

    engine: Engine
    kind: Kind
    beside: Sidecar
    drafts: Path
    order: Path
    temperature: float
    texts: Iterator[str]
    own: dict[str, Counter[str]] = field(default_factory=dict)  # counts of the engine, by the draft's version
    running: ExitStack = field(default_factory=ExitStack)

    def start(self) -> None:
        self.running.callback(self.engine.stop)
        self.engine.start()
        name, _, self.version = (self.drafts / "proxy.env").read_text().strip().partition("=")
        assert name == "DRIFTGUARD_PROXY__DRAFT_VERSION"
        options = ["--server", "real", "--draft", "small", "--method", "draft_model"]
        options += ["--draft-version", self.version, "--num-speculative-tokens", str(K)]
        self.proxy: Proxy = self.running.enter_context(
            proxy(self.drafts, self.engine.url, self.beside.url, *options)
        )

    def count(self) -> None:
        """At the end of the engine's life."""
        self.own.setdefault(self.version, Counter()).update(self.kind.own_counts(self.engine))

    def restart(self) -> None:
        """What the order asks systemd for."""
        wait_until(lambda: bool(run(self.beside)) and self.order.exists(), "the order", TRAINING_SECONDS)
        self.count()
        self.running.close()
        self.start()
        self.order.unlink()
        self.order.with_suffix(".done").touch()

    def ask(self, requests: int = REQUESTS) -> list[TokenIds]:
        """Returns what was served."""
        texts = itertools.islice(self.texts, requests)
        served = [
            self.kind.ask(self.proxy.url, text, SEGMENT, temperature=self.temperature) for text in texts
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


@pytest.fixture(
    params=[
        pytest.param(("llama", 0.0), marks=needs_llama, id="llama greedy"),
        pytest.param(("llama", 1.0), marks=needs_llama, id="llama sampled"),
        pytest.param(("vllm", 0.0), marks=needs_vllm, id="vllm greedy"),
    ]
)
def serving(request: pytest.FixtureRequest, database_url: str, tmp_path: Path) -> Iterator[Serving]:
    name, temperature = request.param
    kind, drafts, order = KINDS[name], tmp_path / "drafts", tmp_path / "order.json"
    drafts.mkdir()
    if name == "llama":
        target, draft = request.getfixturevalue("converted")
        (drafts / "current.gguf").symlink_to(draft)
        engine = llama_server(target, drafts / "current.gguf", tmp_path)
    else:
        (drafts / "current").symlink_to(DRAFT)
        engine = vllm_server(tmp_path, speculative_config(drafts / "current"))
    (drafts / "proxy.env").write_text("DRIFTGUARD_PROXY__DRAFT_VERSION=v1\n")
    texts = iter(prompts(SEGMENT, 3 * REQUESTS, seed=SEED, characters=clients.CHARACTERS))
    command = guides_command(kind, drafts, order, tmp_path / "promote.sh")
    with sidecar(tmp_path / "sidecar", database_url, settings(command)) as beside:
        found = Serving(engine, kind, beside, drafts, order, temperature, texts)
        with found.running:
            found.start()
            yield found


def test_a_draft_is_trained_promoted_and_rolled_back(serving: Serving, tmp_path: Path) -> None:
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
    assert abs(of_same - after) < (serving.kind.unseen if serving.temperature == 0.0 else 0.03)

    wanted = {"server": "real", "draft_version": version, "reason": "answers loop"}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(beside.client.post, "/api/v1/rollback", json=wanted, timeout=RESTART_SECONDS)
        serving.restart()
        assert answer.result().json() == {"server": "real", "draft_version": "v1", "awaited": True}
    serving.ask(1)
    wait_until(lambda: run(beside)["state"] == "rolled_back", "records of the old draft")
    serving.count()
    for draft_version, own in serving.own.items():
        ours = of_all([one for one in beside.records() if one.draft_version == draft_version])
        exact = {name: own[name] for name in serving.kind.counts}
        print(f"{draft_version}: ours {ours}, its own {exact}")
        assert {name: ours[name] for name in exact} == exact


def guides_command(kind: Kind, drafts: Path, order: Path, script: Path) -> Path:
    """The guide's script for this engine, with the paths of this test."""
    sections = rf"^{kind.section}.*?```bash\n(.*?)^```"
    (found,) = re.findall(sections, GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    changed = {"/srv/drafts": str(drafts)}
    for theirs, module in kind.commands.items():
        changed[theirs] = f"{sys.executable} -m tests.live.{module.format(order=order)}"
    for theirs, ours in changed.items():
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
promote_timeout_seconds = {RESTART_SECONDS}
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

"""llama.cpp's and vLLM's own servers, and vLLM in BentoML, as child processes on free ports of loopback, with
the bundled pair."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import driftguard_engine
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from driftguard.demo.processes import free_url
from tests.live.install import (
    ARCTIC,
    BENTOML_PYTHON,
    LLAMA_SERVER,
    ROUTERS_PYTHON,
    VLLM_PYTHON,
    is_installed,
)

BUNDLED = Path(driftguard_engine.__file__).parent / "bundled"
TARGET, DRAFT = BUNDLED / "target", BUNDLED / "draft"
K = 4
STOP_SECONDS = 30.0
START_SECONDS = {"llama": 30.0, "vllm": 300.0, "bentoml": 300.0, "router": 60.0}

needs_llama = pytest.mark.skipif(
    not is_installed("llama"), reason=f"{LLAMA_SERVER} is not there: `python -m tests.live.install llama`"
)
needs_vllm = pytest.mark.skipif(
    not is_installed("vllm"), reason=f"{VLLM_PYTHON} is not there: `python -m tests.live.install vllm`"
)
needs_suffix = pytest.mark.skipif(
    not is_installed("suffix"), reason=f"{ARCTIC} is not there: `python -m tests.live.install suffix`"
)
needs_bentoml = pytest.mark.skipif(
    not is_installed("bentoml"),
    reason=f"{BENTOML_PYTHON} is not there: `python -m tests.live.install bentoml`",
)
needs_routers = pytest.mark.skipif(
    not is_installed("routers"),
    reason=f"{ROUTERS_PYTHON} is not there: `python -m tests.live.install routers`",
)


@dataclass
class Engine:
    """One server on one port over many lives."""

    kind: str
    url: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers. Raises AssertionError with the end of its log."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                env={**os.environ, **self.environment}, start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + START_SECONDS[self.kind]
        while not self._answers():
            assert self.process.poll() is None, f"it ended with {self.process.returncode}: {self.tail()}"
            assert time.monotonic() < deadline, f"it did not start: {self.tail()}"
            time.sleep(0.1)

    def stop(self, signal_number: int = signal.SIGTERM) -> None:
        if self.process is None:
            return
        if self.process.poll() is None:  # one that ended by itself has told why to who started it
            os.killpg(self.process.pid, signal_number)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self.process = None

    def counters(self) -> Counter[str]:
        """Its own metrics, of all label sets but positions together. Read by prometheus_client, not by the
        adapters that are tested."""
        found: Counter[str] = Counter()
        for family in text_string_to_metric_families(httpx.get(f"{self.url}/metrics").text):
            for sample in family.samples:
                position = sample.labels.get("position")
                found[sample.name if position is None else f"{sample.name}@{position}"] += sample.value  # type: ignore[assignment]
        return found

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=2.0).status_code == 200
        except httpx.HTTPError:
            return False


@contextmanager
def running(engine: Engine) -> Iterator[Engine]:
    try:
        engine.start()
        yield engine
    finally:
        engine.stop()


def gguf(model: Path, directory: Path) -> Path:
    """Converts a Llama model. Returns the file."""
    file = directory / f"{model.name}.gguf"
    command = [sys.executable, "-m", "tests.live.to_gguf", str(model), "--outfile", str(file)]
    subprocess.run(command, check=True, capture_output=True)
    return file


def llama_server(target: Path, draft: Path, directory: Path, *options: str) -> Engine:
    """Of files in GGUF. `options` come last, so that they take precedence."""
    url = free_url()
    command = [
        str(LLAMA_SERVER), "--model", str(target), "--spec-draft-model", str(draft), "--alias", "target",
        "--spec-type", "draft-simple", "--spec-draft-n-max", str(K), "--spec-draft-n-min", "0",
        "--host", "127.0.0.1", "--port", url.rsplit(":", 1)[1], "--metrics", "--ctx-size", "4096",
        "--parallel", "4", "--threads", "1", "--gpu-layers", "0", "--no-webui", *options,
    ]  # fmt: skip
    return Engine("llama", url, command, directory / "llama-server.log")


# The bundled tokenizer has none.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def speculative_config(draft: Path | str) -> str:
    """A --speculative-config."""
    return json.dumps({"method": "draft_model", "model": str(draft), "num_speculative_tokens": K})


def vllm_server(directory: Path, speculative: str, *options: str, target: Path = TARGET) -> Engine:
    """`speculative`: the value of --speculative-config."""
    url = free_url()
    command = [
        str(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(target),
        "--served-model-name", "target", "--host", "127.0.0.1", "--port", url.rsplit(":", 1)[1],
        "--chat-template", CHAT_TEMPLATE,
        "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "8", "--dtype", "bfloat16",
        "--max-num-batched-tokens", "1024", "--speculative-config", speculative,
        "--per-request-spec-decode-metrics", "summary", "--enable-per-request-metrics", *options,
    ]  # fmt: skip
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return Engine("vllm", url, command, directory / "vllm.log", environment)


def with_plugin(engine: Engine, sidecar_url: str) -> Engine:
    """A vLLM that records into this sidecar, all token ids too, as server "real" with draft version v1."""
    labels = ["--middleware", "driftguard_vllm.RequestLabels"]
    environment = {
        "DRIFTGUARD_VLLM_SIDECAR": sidecar_url,
        "DRIFTGUARD_VLLM_SERVER": "real",
        "DRIFTGUARD_VLLM_DRAFT_VERSION": "v1",
        "DRIFTGUARD_VLLM_CAPTURE_FRACTION": "1",
    }
    engine.command, engine.environment = [*engine.command, *labels], {**engine.environment, **environment}
    return engine


def live_updates(engine: Engine) -> Engine:
    """A vLLM with the plugin, into which drafts can be loaded."""
    engine.command = [*engine.command, "--weight-transfer-config", '{"backend": "driftguard"}']
    engine.environment = {**engine.environment, "VLLM_SERVER_DEV_MODE": "1"}
    return engine


def in_bentoml(vllm: Engine, directory: Path) -> Engine:
    """A BentoML service that starts this vLLM, which was not started, and passes requests on to it."""
    url = free_url()
    command = [
        str(BENTOML_PYTHON), "-m", "bentoml", "serve", "bentoml_service:VLLM",
        "--working-dir", str(Path(__file__).parent), "--host", "127.0.0.1", "--port", url.rsplit(":", 1)[1],
    ]  # fmt: skip
    environment = {
        **vllm.environment,
        "VLLM_COMMAND": json.dumps(vllm.command),
        "VLLM_PORT": vllm.url.rsplit(":", 1)[1],
        "BENTOML_HOME": str(directory / "bentoml"),
        "BENTOML_DO_NOT_TRACK": "True",
    }
    return Engine("bentoml", url, command, directory / "bentoml.log", environment)


def router(name: str, upstream: str, directory: Path) -> Engine:
    """One of install.ROUTERS, in front of one server."""
    url, metrics_url = free_url(), free_url()
    command = [
        str(ROUTERS_PYTHON), "-m", f"{name.replace('-', '_')}.launch_router", "--worker-urls", upstream,
        "--host", "127.0.0.1", "--port", url.rsplit(":", 1)[1],
        "--prometheus-port", metrics_url.rsplit(":", 1)[1],
    ]  # fmt: skip
    return Engine("router", url, command, directory / f"{name}.log")

"""vLLM in BentoML, as BentoML's own examples have it; its environment starts this file, by `bentoml serve`.

BentoML passes requests on to the vLLM of `VLLM_COMMAND` on `VLLM_PORT`; `/metrics` has the metrics of both.
"""

from __future__ import annotations

import json
import os

import bentoml  # type: ignore[import-not-found]
import httpx

PORT = int(os.environ["VLLM_PORT"])


@bentoml.service(http={"proxy_port": PORT})
class VLLM:
    def __command__(self) -> list[str]:
        return list(json.loads(os.environ["VLLM_COMMAND"]))

    def __metrics__(self, own: str) -> str:
        return own + "\n" + httpx.get(f"http://127.0.0.1:{PORT}/metrics").raise_for_status().text

"""How speculation is switched off and how K is set in each serving engine, in words for an operator."""

from __future__ import annotations

import json
import shlex
from typing import Final

_OFF: Final[dict[str, str]] = {
    "vllm": "start vLLM without --speculative-config",
    "sglang": "start SGLang without --speculative-algorithm",
    "tgi": "start TGI without --speculate",
    "tensorrt_llm": "start trtllm-serve without speculative_config",
    "llamacpp": "start llama-server without --spec-draft-model",
    "lmdeploy": "start LMDeploy without --speculative-algorithm",
    "bentoml": "start the vLLM inside without --speculative-config",
}
_K: Final[dict[str, str]] = {
    "vllm": 'start vLLM with "num_speculative_tokens": {k} in --speculative-config',
    "sglang": "start SGLang with --speculative-num-steps {k} --speculative-num-draft-tokens {more}",
    "tgi": "start TGI with --speculate {k}",
    "tensorrt_llm": "start trtllm-serve with max_draft_len: {k} in its speculative_config",
    "llamacpp": "start llama-server with --spec-draft-n-max {k}",
    "lmdeploy": "start LMDeploy with --speculative-num-draft-tokens {k}",
    "bentoml": 'start the vLLM inside with "num_speculative_tokens": {k} in --speculative-config',
    "driftguard": "start driftguard engine with --num-speculative-tokens {k}",
}


def switching_off(server: str, kind: str | None, admin_url: str | None, *, with_key: bool = False) -> str:
    """A command for the built-in engine, else what to change at its next start. `kind`: of the adapter; None
    where it is not known. `admin_url`: of a built-in engine; `with_key`: it asks for one."""
    if admin_url is not None:
        url = f"{admin_url.rstrip('/')}/admin/speculation"
        return post(url, {"enabled": False}, with_key=with_key)
    if kind == "driftguard":
        # Whether it asks for a key is not known: one on loopback, which may need none, ignores it then.
        return post("http://ENGINE:8100/admin/speculation", {"enabled": False}, with_key=True)
    return _OFF.get(kind or "") or f"start {server} without its options for speculation"


def setting_k(server: str, kind: str | None, k: int) -> str:
    """What to change at its next start."""
    told = _K.get(kind or "") or f"start {server} with {{k}} draft token{'s' if k > 1 else ''} per step"
    return told.replace("{k}", str(k)).replace("{more}", str(k + 1))


def post(url: str, body: dict[str, object], *, with_key: bool = False) -> str:
    """A command for a shell. `with_key`: that in its variable DRIFTGUARD_API_KEY."""
    data = shlex.quote(json.dumps(body, ensure_ascii=False))
    key = '-H "Authorization: Bearer $DRIFTGUARD_API_KEY" ' if with_key else ""
    return f"curl -s -X POST {shlex.quote(url)} {key}-H 'Content-Type: application/json' -d {data}"

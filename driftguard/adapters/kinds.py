"""Detects an engine by the names of its metrics."""

from __future__ import annotations

from driftguard.adapters.adapter import Adapter, Kind
from driftguard.adapters.bentoml import BENTOML
from driftguard.adapters.built_in_engine import BUILT_IN_ENGINE
from driftguard.adapters.llamacpp import LLAMACPP
from driftguard.adapters.lmdeploy import LMDEPLOY
from driftguard.adapters.reading import sample_names
from driftguard.adapters.sglang import SGLANG
from driftguard.adapters.tensorrt_llm import TENSORRT_LLM
from driftguard.adapters.tgi import TGI
from driftguard.adapters.vllm import VLLM

# BentoML before vLLM: its /metrics holds the metrics of both.
_ALL: tuple[Adapter, ...] = (BENTOML, VLLM, SGLANG, TGI, TENSORRT_LLM, LLAMACPP, LMDEPLOY, BUILT_IN_ENGINE)
ADAPTERS: dict[Kind, Adapter] = {adapter.kind: adapter for adapter in _ALL}


def detect(text: str) -> Adapter | None:
    """None if there is no metric of a supported engine."""
    names = list(sample_names(text))
    return next((adapter for adapter in _ALL if any(name.startswith(adapter.prefix) for name in names)), None)

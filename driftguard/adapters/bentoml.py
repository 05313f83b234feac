"""BentoML and OpenLLM: their /metrics also has the metrics of the vLLM that they started."""

from __future__ import annotations

from dataclasses import replace

from driftguard.adapters.adapter import Adapter
from driftguard.adapters.vllm import VLLM

BENTOML = replace(
    VLLM,
    kind="bentoml",
    name="BentoML",
    prefix="bentoml_",
    show_metrics="let the service append the metrics of its vLLM to /metrics",
    speculate="start the vLLM inside with --speculative-config",
)


def has_engine(adapter: Adapter, text: str) -> bool:
    """Whether metrics that were recognised as those of `adapter` have its engine's: a service that cannot
    reach its vLLM, as while that starts, may answer with its own alone."""
    return adapter is not BENTOML or VLLM.prefix in text

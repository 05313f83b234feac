"""A plugin of vLLM: one acceptance record per request, from the counts of its own scheduler.

An answer of vLLM holds no counts where the request ended on a stop string, was aborted, or has several
sequences; the scheduler has them all. `register` is found by vLLM through its entry point
`vllm.general_plugins`, `RequestLabels` is a middleware that passes a request's segment and session on. What
happens to a request: docs/vllm-plugin.md.

This package imports neither torch nor, before vLLM calls it, vLLM.
"""

from driftguard_vllm.labels import RequestLabels
from driftguard_vllm.plugin import register

__all__ = ["RequestLabels", "register"]

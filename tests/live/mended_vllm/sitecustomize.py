"""Mends a fault of vLLM 0.32 on a CPU, in each of its processes, whose PYTHONPATH has this directory.

vLLM copies the temperature of a request to its draft tokens by a function for whole numbers
(`_expand_kernel_impl` of vllm.utils.cpu_triton_utils), whose result is lost: they are verified at
temperatures that were never set.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

MENDED = "vllm.v1.sample.rejection_sampler"


def expand_batch_to_tokens(
    x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Any:
    """x [batch_size], as often as each has tokens, [num_tokens]."""
    each = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    expanded = x.repeat_interleave(each.long(), output_size=num_tokens)
    return expanded.masked_fill(expanded == replace_from, replace_to)


class Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == MENDED else None
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_mend(module: Any) -> None:
                load(module)
                assert hasattr(module, "expand_batch_to_tokens")
                module.expand_batch_to_tokens = expand_batch_to_tokens

            spec.loader.exec_module = load_and_mend  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())

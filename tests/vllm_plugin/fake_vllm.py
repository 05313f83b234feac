"""What of vLLM 0.32 the plugin looks at, with its parameters. tests/live has vLLM itself."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar


@dataclass
class SamplingParams:
    temperature: float = 0.0
    extra_args: dict[str, Any] | None = None


@dataclass
class Request:
    request_id: str
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    arrival_time: float = field(default_factory=time.time)
    prompt_token_ids: list[int] = field(default_factory=lambda: [1, 2, 3])
    output_token_ids: list[int] = field(default_factory=list)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


class Scheduler:
    def __init__(self) -> None:
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(served_model_name="org/target"),
            speculative_config=SimpleNamespace(
                model="/models/small/", method="draft_model", num_speculative_tokens=3
            ),
        )

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: object,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> str:
        return f"{num_accepted_tokens} of {num_draft_tokens}"

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> list[int]:
        request.output_token_ids.extend(new_token_ids)
        return new_token_ids

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> str:
        return "freed"

    def shutdown(self) -> None:
        pass

    def step(self, request: Request, drafted: int, new: list[int]) -> None:
        """As `update_from_output` does for one request."""
        if drafted:
            given = {"num_draft_tokens": drafted, "num_accepted_tokens": len(new) - 1}
            self.make_spec_decoding_stats(
                None, **given, num_invalid_spec_tokens=None, request_id=request.request_id
            )
        self._update_request_with_output(request, new)


class InputProcessor:
    def process_inputs(self, request_id: str, prompt: object, params: SamplingParams) -> SamplingParams:
        return params


class EngineCore:
    """As in the process of the scheduler."""

    def __init__(self, backend: str | None) -> None:
        transfer = SimpleNamespace(backend=backend) if backend else None
        self.vllm_config = SimpleNamespace(weight_transfer_config=transfer)

    def set_weight_version(self, weight_version: str) -> None:
        self.weight_version = weight_version


class WeightTransferEngineFactory:
    registry: ClassVar[dict[str, tuple[str, str | None]]] = {}

    @classmethod
    def register_engine(cls, name: str, module_path_or_cls: str, class_name: str | None = None) -> None:
        if name in cls.registry:
            raise ValueError(f"Weight transfer engine '{name}' is already registered.")
        cls.registry[name] = module_path_or_cls, class_name


@contextmanager
def installed(scheduler: type = Scheduler) -> Iterator[tuple[type, type]]:
    """As modules, with classes that may be patched. Yields (Scheduler, InputProcessor)."""
    classes = type("Scheduler", (scheduler,), {}), type("InputProcessor", (InputProcessor,), {})
    core, backends = (
        type("EngineCore", (EngineCore,), {}),
        type("WeightTransferEngineFactory", (WeightTransferEngineFactory,), {"registry": {}}),
    )
    names = ["vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched", "vllm.v1.engine"]
    names += ["vllm.distributed", "vllm.distributed.weight_transfer"]
    modules: dict[str, Any] = {name: ModuleType(name) for name in names}
    modules["vllm"].__version__ = "0.32.0"
    for name, held in (
        ("vllm.v1.core.sched.scheduler", classes[0]),
        ("vllm.v1.engine.input_processor", classes[1]),
        ("vllm.v1.engine.core", core),
        ("vllm.distributed.weight_transfer.factory", backends),
    ):
        modules[name] = ModuleType(name)
        setattr(modules[name], held.__name__, held)
    sys.modules.update(modules)
    try:
        yield classes
    finally:
        for name in modules:
            del sys.modules[name]

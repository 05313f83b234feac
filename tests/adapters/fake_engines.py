"""The metrics of each serving engine, as text, after the requests that a test lets it serve.

vLLM's and llama.cpp's lines are those of real scrapes (see test_real_scrapes.py). The others are written from
the documented names, without a real scrape.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from driftguard.adapters.adapter import Kind

K = 4
MODEL = "meta/Llama-3.1-8B"


@dataclass
class FakeEngine(ABC):
    """Counts since its start. `accepted` [K] and `drafted` [K] are by position."""

    started_at: float = 1_750_000_000.0
    steps: int = 0
    drafted: list[int] = field(default_factory=lambda: [0] * K)
    accepted: list[int] = field(default_factory=lambda: [0] * K)
    plain_tokens: int = 0  # generated without a draft
    requests: int = 0
    running: int = 3  # of vLLM
    waiting: int = 0  # in the queue
    kind: ClassVar[Kind] = "vllm"
    path: ClassVar[str] = "/metrics"

    def serve(self, accepted_of_each_step: list[int], requests: int = 1) -> None:
        for accepted in accepted_of_each_step:
            self.steps += 1
            for place in range(K):
                self.drafted[place] += 1
                self.accepted[place] += place < accepted
        self.requests += requests

    def restart(self, at: float) -> None:
        self.__init__(started_at=at)  # type: ignore[misc]

    @property
    def generated(self) -> int:
        return self.steps + sum(self.accepted) + self.plain_tokens

    @abstractmethod
    def text(self) -> str: ...

    def histogram(self, name: str, labels: str, total: float, count: int) -> str:
        return f"{name}_sum{labels} {total}\n{name}_count{labels} {count}\n"

    def first_tokens(self, prefix: str, labels: str) -> str:
        return self.histogram(
            f"{prefix}time_to_first_token_seconds", labels, 0.25 * self.requests, self.requests
        )

    def counters(self, prefix: str, labels: str, positions: str) -> str:
        """As vLLM, LMDeploy and llama.cpp print them; `positions`: labels with the position left open."""
        lines = [
            f"{prefix}spec_decode_num_drafts_total{labels} {self.steps}",
            f"{prefix}spec_decode_num_drafts_created{labels} {self.started_at}",
            f"{prefix}spec_decode_num_draft_tokens_total{labels} {sum(self.drafted)}",
            f"{prefix}spec_decode_num_draft_tokens_created{labels} {self.started_at}",
            f"{prefix}spec_decode_num_accepted_tokens_total{labels} {sum(self.accepted)}",
        ]
        for place, count in enumerate(self.accepted):
            position = positions % place
            lines.append(f"{prefix}spec_decode_num_accepted_tokens_per_pos_total{position} {count}")
            lines.append(
                f"{prefix}spec_decode_num_accepted_tokens_per_pos_created{position} {self.started_at}"
            )
        return "\n".join(lines) + "\n"


class FakeVllm(FakeEngine):
    def text(self) -> str:
        labels = f'{{engine="0",model_name="{MODEL}"}}'
        return (
            f"process_start_time_seconds {self.started_at}\n"
            + self.counters("vllm:", labels, f'{{engine="0",model_name="{MODEL}",position="%d"}}')
            + f"vllm:generation_tokens_total{labels} {self.generated}\n"
            + f"vllm:prompt_tokens_total{labels} {100 * self.requests}\n"
            + f"vllm:num_requests_running{labels} {self.running}\n"
            + f"vllm:num_requests_waiting{labels} {self.waiting}\n"
            + self.first_tokens("vllm:", labels)
            + self.histogram("vllm:inter_token_latency_seconds", labels, 0.02 * self.steps, self.steps)
        )


class FakeBentoMl(FakeVllm):
    """BentoML 1.4 hands its directory of metrics to its vLLM: it prints vLLM's series, and appends them."""

    kind: ClassVar[Kind] = "bentoml"

    def text(self) -> str:
        vllm = super().text()
        return f'bentoml_service_request_total{{endpoint="generate"}} 7\n{vllm}\n{vllm}'


class FakeLmDeploy(FakeEngine):
    kind: ClassVar[Kind] = "lmdeploy"

    def text(self) -> str:
        labels = f'{{engine="0",model_name="{MODEL}"}}'
        rate = sum(self.accepted) / max(sum(self.drafted), 1)
        return (
            self.counters("lmdeploy:", labels, f'{{engine="0",model_name="{MODEL}",position="%d"}}')
            + f"lmdeploy:spec_decode_mean_accept_rate{labels} {rate}\n"
            + f"lmdeploy:generation_tokens_total{labels} {self.generated}\n"
            + f"lmdeploy:prompt_tokens_total{labels} {100 * self.requests}\n"
            + self.first_tokens("lmdeploy:", labels)
            + self.histogram("lmdeploy:time_per_output_token_seconds", labels, 0.01 * self.steps, self.steps)
            + self.histogram("lmdeploy:iter_token_latency", labels, 0.02 * self.steps, self.steps)
        )


class FakeLlamaCpp(FakeEngine):
    """Its server prints all counters but those of positions through a stream of six significant digits."""

    kind: ClassVar[Kind] = "llamacpp"

    def text(self) -> str:
        lines = self._text().splitlines()
        return "".join(f"{line}\n" if "{" in line else _of_six_digits(line) for line in lines)

    def _text(self) -> str:
        text = self.counters("llamacpp:", "", '{position="%d"}')
        if not self.steps:  # the positions appear with the first draft
            text = "".join(line + "\n" for line in text.splitlines() if "per_pos" not in line)
        return (
            text
            + f"llamacpp:tokens_predicted_total {self.generated}\n"
            + f"llamacpp:tokens_predicted_seconds_total {0.02 * self.steps}\n"
            + f"llamacpp:prompt_tokens_total {100 * self.requests}\n"
            + "llamacpp:requests_processing 2\n"
            + f"llamacpp:requests_deferred {self.waiting}\n"
        )


def _of_six_digits(line: str) -> str:
    name, value = line.split()
    return f"{name} {float(value):.6g}\n"


class FakeTensorRtLlm(FakeEngine):
    kind: ClassVar[Kind] = "tensorrt_llm"
    path: ClassVar[str] = "/prometheus/metrics"

    def text(self) -> str:
        labels = f'{{engine_type="trtllm",model_name="{MODEL}"}}'
        text = (
            f'trtllm_speculative_config_info{{engine_type="trtllm",model_name="{MODEL}",spec_enabled="true",'
            f'spec_method="Eagle3",spec_num_tokens="{K}",spec_draft_model="org/eagle3"}} 1.0\n'
            f"trtllm_spec_decode_num_draft_tokens_total{labels} {sum(self.drafted)}\n"
            f"trtllm_spec_decode_num_accepted_tokens_total{labels} {sum(self.accepted)}\n"
            f"trtllm_generation_tokens_total{labels} {self.generated}\n"
        ) + self.first_tokens("trtllm_", labels)
        for name, counts in (("drafted", self.drafted), ("accepted", self.accepted)):
            for place, count in enumerate(counts):
                position = f'{{engine_type="trtllm",model_name="{MODEL}",token_position="{place}"}}'
                text += f"trtllm_spec_decode_{name}_tokens_total{position} {count}\n"
        return text


class FakeSGLang(FakeEngine):
    kind: ClassVar[Kind] = "sglang"

    def text(self) -> str:
        lines = []
        for rank in (0, 1):  # gauges repeat per rank
            labels = f'{{engine_type="unified",model_name="{MODEL}",pp_rank="0",tp_rank="{rank}"}}'
            lines += [
                f"sglang:spec_accept_length{labels} {self.generated / max(self.steps, 1)}",
                f"sglang:spec_num_steps{labels} {K}",
                f"sglang:spec_num_draft_tokens{labels} {K + 1}",
            ]
        labels = f'{{engine_type="unified",model_name="{MODEL}"}}'
        lines += [
            f"sglang:spec_verify_calls_total{labels} {self.steps}",
            f"sglang:generation_tokens_total{labels} {self.generated + self.requests}",
            f"sglang:num_requests_total{labels} {self.requests}",
            f"sglang:prompt_tokens_total{labels} {100 * self.requests}",
            f"sglang:num_queue_reqs{labels} {self.waiting}",
        ]
        return "\n".join(lines) + "\n" + self.first_tokens("sglang:", labels)


class FakeTgi(FakeEngine):
    kind: ClassVar[Kind] = "tgi"

    def text(self) -> str:
        return (
            self.histogram("tgi_request_skipped_tokens", "", sum(self.accepted), self.steps)
            + self.histogram(
                "tgi_request_mean_time_per_token_duration", "", 0.01 * self.requests, self.requests
            )
            + self.histogram("tgi_request_input_length", "", 100 * self.requests, self.requests)
            + f"tgi_queue_size {self.waiting}\n"
        )


class FakeBuiltInEngine(FakeEngine):
    kind: ClassVar[Kind] = "driftguard"

    def text(self) -> str:
        version = '{draft_version="v1"}'
        text = (
            f"process_start_time_seconds {self.started_at}\n"
            'driftguard_engine_info{draft="small",draft_version="v1",method="draft_model",server="here",'
            f'target="{MODEL}",verify_backend="reference"}} 1.0\n'
            f"driftguard_engine_steps_total{version} {self.steps}\n"
            f"driftguard_engine_draft_tokens_total{version} {sum(self.drafted)}\n"
            f"driftguard_engine_accepted_tokens_total{version} {sum(self.accepted)}\n"
            f"driftguard_engine_output_tokens_total {self.generated}\n"
            f"driftguard_engine_waiting_requests {self.waiting}\n"
        ) + self.first_tokens("driftguard_engine_", "")
        for name, counts in (("draft", self.drafted), ("accepted", self.accepted)):
            for place, count in enumerate(counts):
                position = f'{{draft_version="v1",position="{place}"}}'
                text += f"driftguard_engine_position_{name}_tokens_total{position} {count}\n"
        return text


ENGINES: tuple[type[FakeEngine], ...] = (
    FakeVllm,
    FakeBentoMl,
    FakeLmDeploy,
    FakeLlamaCpp,
    FakeTensorRtLlm,
    FakeSGLang,
    FakeTgi,
    FakeBuiltInEngine,
)

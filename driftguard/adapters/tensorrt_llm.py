"""TensorRT-LLM's trtllm-serve, on /prometheus/metrics: reading its JSON /metrics consumes it for other
readers.

Counters per position (of finished requests) give the steps: every step drafts position 0. Versions without
them count per iteration and have no steps; with a fixed K the steps are draft tokens / K, fidelity gauge.
So does the window in which those per position appear, with what earlier windows have counted by iteration.
"""

from __future__ import annotations

from collections.abc import Sequence

from driftguard.adapters.adapter import Kind
from driftguard.adapters.reading import Increase, Reading, sums_and_counts
from driftguard.adapters.window import Identity, Incomplete, Window
from driftguard.records import Fidelity

_BY_POSITION = ("trtllm_spec_decode_drafted_tokens_total", "trtllm_spec_decode_accepted_tokens_total")
_BY_ITERATION = ("trtllm_spec_decode_num_draft_tokens_total", "trtllm_spec_decode_num_accepted_tokens_total")
_GENERATED, _PROMPTS = "trtllm_generation_tokens_total", "trtllm_prompt_tokens_total"
_FIRST_TOKEN, _PER_TOKEN = "trtllm_time_to_first_token_seconds", "trtllm_time_per_output_token_seconds"
_RUNNING, _CONFIGURED = "trtllm_num_requests_running", "trtllm_speculative_config_info"
_COUNTERS = frozenset(
    {*_BY_POSITION, *_BY_ITERATION, _GENERATED, _PROMPTS} | sums_and_counts(_FIRST_TOKEN, _PER_TOKEN)
)


class TensorRtLlm:
    kind: Kind = "tensorrt_llm"
    name = "TensorRT-LLM"
    prefix = "trtllm_"
    path = "/prometheus/metrics"
    names = _COUNTERS | {_RUNNING, _CONFIGURED}
    fidelity: Fidelity = "counter"
    names_target = True
    show_metrics = "set return_perf_metrics: true for trtllm-serve, and scrape /prometheus/metrics"
    speculate = "set speculative_config for trtllm-serve"

    def windows(self, before: Reading, after: Reading, known: Identity) -> Sequence[Window]:
        increase = Increase.between(before, after, _COUNTERS)
        names = (_BY_POSITION[0], _BY_ITERATION[0], _GENERATED)  # without speculation it has the last alone
        series = next((name for name in names if after.of(name)), _GENERATED)
        targets = sorted(after.values_of(series, "model_name"))
        return [_window(target, increase, before, after, known) for target in targets]


def _window(target: str, increase: Increase, before: Reading, after: Reading, known: Identity) -> Window:
    label = {"model_name": target} if target else {}
    configured = _configured(after, label)
    drafted, accepted = (increase.per_position(name, "token_position", **label) for name in _BY_POSITION)
    k = known.num_speculative_tokens or _whole_number(configured.get("spec_num_tokens"))
    counts_drafts = bool(drafted or after.of(_BY_ITERATION[0], **label))
    counted_before = k is not None and bool(before.total(_BY_ITERATION[0], **label))
    if counted_before and not before.of(_BY_POSITION[0], **label):
        drafted = None
    if drafted is None:
        counts = _by_iteration(increase, k, label) if counts_drafts else (0, 0, 0)
        fidelity: Fidelity = "gauge"
    else:
        accepted = [*(accepted or []), *[0] * len(drafted)][: len(drafted)]
        counts = drafted[0], sum(drafted), sum(accepted)
        fidelity = "counter"
    return Window(
        target=target or None,
        begun_at=increase.begun_at,
        ended_at=after.at,
        steps=counts[0],
        drafted=counts[1],
        accepted=counts[2],
        generated=increase.whole(_GENERATED, **label) or 0,
        fidelity=fidelity,
        speculated_before=bool(after.total((_BY_POSITION if drafted else _BY_ITERATION)[0], **label)),
        drafted_per_position=drafted,
        accepted_per_position=accepted if drafted else None,
        num_speculative_tokens=k,
        prompt_tokens=increase.whole(_PROMPTS, **label),
        time_to_first_token_seconds=increase.mean(_FIRST_TOKEN, **label),
        time_per_output_token_seconds=increase.mean(_PER_TOKEN, **label),
        concurrency=after.whole(_RUNNING, **label),
        counts_drafts=counts_drafts,
        started_requests=increase.whole(f"{_FIRST_TOKEN}_count", **label),
        draft=configured.get("spec_draft_model") or None,
        method=configured.get("spec_method", "").lower() or None,
    )


def _by_iteration(increase: Increase, k: int | None, label: dict[str, str]) -> tuple[int, int, int]:
    if k is None:
        raise Incomplete(
            "this version of TensorRT-LLM does not count its steps; set `num_speculative_tokens`"
        )
    drafted, accepted = (increase.whole(name, **label) or 0 for name in _BY_ITERATION)
    return max(-(-drafted // k), -(-accepted // k)), drafted, accepted


def _configured(after: Reading, label: dict[str, str]) -> dict[str, str]:
    return next((dict(labels) for labels in after.of(_CONFIGURED, **label)), {})


def _whole_number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() and int(text) > 0 else None


TENSORRT_LLM = TensorRtLlm()

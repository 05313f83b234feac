"""SGLang. Tokens per verification are counted; draft tokens are not, so their number is steps x K. The first
token of a request comes from reading its prompt, and from no verification.

K is `spec_num_draft_tokens` - 1: SGLang includes the token that the drafts follow. With
--speculative-adaptive K changes between scrapes; a window in which it changed is left out. Until its first 40
forward passes that gauge is 0, as is the acceptance length: K is not told yet.
Versions without `spec_verify_calls_total` give the acceptance length of their last log interval as a gauge,
which keeps its value while the server is idle: it is only used if tokens were generated. It is 0 without
speculation as well: that is believed after as many tokens as one request may get in 40 passes.
Gauges repeat per rank of one replica; counters are kept by its first rank, some of them by more labels than
others. With --enable-priority-scheduling the gauges of requests repeat per priority, beside their totals,
whose priority is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from driftguard.adapters.adapter import Kind
from driftguard.adapters.reading import Increase, Reading, sums_and_counts
from driftguard.adapters.window import Identity, Incomplete, LeftOut, Window
from driftguard.records import Fidelity

_STEPS, _LENGTH = "sglang:spec_verify_calls_total", "sglang:spec_accept_length"
_DRAFT_TOKENS, _DRAFT_STEPS = "sglang:spec_num_draft_tokens", "sglang:spec_num_steps"
_GENERATED, _PROMPTS = "sglang:generation_tokens_total", "sglang:prompt_tokens_total"
_REQUESTS = "sglang:num_requests_total"  # counted with their tokens, when they finish
_FIRST_TOKEN, _BETWEEN = "sglang:time_to_first_token_seconds", "sglang:inter_token_latency_seconds"
_RUNNING, _WAITING = "sglang:num_running_reqs", "sglang:num_queue_reqs"
_COUNTERS = frozenset({_STEPS, _GENERATED, _PROMPTS, _REQUESTS} | sums_and_counts(_FIRST_TOKEN, _BETWEEN))
_NOT_YET: Final = -1  # in place of K
_PASSES_UNTOLD: Final = 40
_RANKS = ("tp_rank", "pp_rank", "moe_ep_rank")
_PROCESSES: Final = ("worker_addr",)  # where SGLang's router shows the metrics of all that are behind it


class SGLang:
    kind: Kind = "sglang"
    name = "SGLang"
    prefix = "sglang:"
    path = "/metrics"
    names = _COUNTERS | {_LENGTH, _DRAFT_TOKENS, _DRAFT_STEPS, _RUNNING, _WAITING}
    fidelity: Fidelity = "counter"
    names_target = True
    show_metrics = "start SGLang with --enable-metrics"
    speculate = "start SGLang with --speculative-algorithm"

    def windows(self, before: Reading, after: Reading, known: Identity) -> Sequence[Window]:
        before, after = _once(before), _once(after)
        increase = Increase.between(before, after, _COUNTERS, processes=_PROCESSES)
        targets = sorted(after.values_of(_LENGTH, "model_name") | after.values_of(_STEPS, "model_name"))
        return [_window(target, increase, before, after, known) for target in targets]


def _once(reading: Reading) -> Reading:
    """Without what repeats other series."""

    def counts(name: str, labels: dict[str, str]) -> bool:
        if name in (_RUNNING, _WAITING) and labels.get("priority"):
            return False
        return all(labels.get(rank, "0") == "0" for rank in _RANKS) and labels.get("engine_type") != "draft"

    samples = {
        name: {labels: value for labels, value in series.items() if counts(name, dict(labels))}
        for name, series in reading.samples.items()
    }
    return replace(reading, samples=samples)


def _window(target: str, increase: Increase, before: Reading, after: Reading, known: Identity) -> Window:
    label = {"model_name": target}
    k, k_before = _k(after, known, label), _k(before, known, label)
    if k is None:
        raise Incomplete(
            "this version of SGLang does not report how many tokens it drafts; set `num_speculative_tokens`"
        )
    generated = increase.whole(_GENERATED, **label) or 0
    if generated and _has_not_told(increase, after, k, label):
        raise LeftOut("SGLang has not told yet what it drafts, as it has just started")
    if k == _NOT_YET:
        k = 0
    elif k_before not in (None, _NOT_YET, k) and increase.begun_at == before.at:
        raise LeftOut(f"K changed from {k_before} to {k} draft tokens since the last scrape")
    verified = max(generated - (increase.whole(_REQUESTS, **label) or 0), 0)
    steps, fidelity = _steps(increase, after, verified, k, label)
    return Window(
        target=target or None,
        begun_at=increase.begun_at,
        ended_at=after.at,
        steps=steps,
        drafted=steps * k,
        accepted=min(max(verified - steps, 0), steps * k),
        generated=generated,
        fidelity=fidelity,
        speculated_before=bool(after.total(_STEPS, **label) or after.total(_LENGTH, **label)),
        num_speculative_tokens=k,
        prompt_tokens=increase.whole(_PROMPTS, **label),
        time_to_first_token_seconds=increase.mean(_FIRST_TOKEN, **label),
        time_per_output_token_seconds=_seconds_per_token(increase, generated, label),
        concurrency=after.whole(_RUNNING, **label),
        waiting_requests=after.whole(_WAITING, **label),
        started_requests=increase.whole(f"{_FIRST_TOKEN}_count", **label),
    )


def _has_not_told(increase: Increase, after: Reading, k: int, label: dict[str, str]) -> bool:
    """Whether the tokens of a window may have been drafted, and its gauges are those of a start."""
    counted = increase.whole(_STEPS, **label)
    if counted is not None:
        return k == _NOT_YET and counted > 0
    so_far = after.whole(_GENERATED, **label) or 0
    return not any(after.of(_LENGTH, **label).values()) and so_far <= _PASSES_UNTOLD * (max(k, 0) + 1)


def _k(reading: Reading, known: Identity, label: dict[str, str]) -> int | None:
    """None: its version does not tell."""
    if known.num_speculative_tokens is not None:
        return known.num_speculative_tokens
    tokens, steps = (list(reading.of(name, **label).values()) for name in (_DRAFT_TOKENS, _DRAFT_STEPS))
    if (tokens or steps) and not any((*tokens, *steps, *reading.of(_LENGTH, **label).values())):
        return _NOT_YET
    if tokens:
        return max(round(max(tokens)) - 1, 0)
    return round(max(steps)) if steps else None


def _steps(
    increase: Increase, after: Reading, verified: int, k: int, label: dict[str, str]
) -> tuple[int, Fidelity]:
    counted = increase.whole(_STEPS, **label)
    if k == 0:
        return 0, "counter"
    if counted is not None:
        return counted, "counter"
    lengths = [length for length in after.of(_LENGTH, **label).values() if length >= 1.0]
    return (round(verified * len(lengths) / sum(lengths)) if lengths else 0), "gauge"


def _seconds_per_token(increase: Increase, generated: int, label: dict[str, str]) -> float | None:
    """The tokens of a request are counted when it finishes, its inter-token seconds while it runs."""
    seconds, first = increase.of(f"{_BETWEEN}_sum", **label), increase.of(f"{_FIRST_TOKEN}_count", **label)
    tokens = generated - (first or 0.0)
    return seconds / tokens if seconds is not None and tokens > 0 else None


SGLANG = SGLang()

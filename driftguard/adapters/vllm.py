"""vLLM (0.8 to 0.33). Its counters exist from the start; with data parallelism there is a series per
`engine`.

`inter_token_latency_seconds` observes once per step, for any number of tokens, so its sum divided by the
tokens is the time per output token; before 0.11 the same histogram was called
`time_per_output_token_seconds`.
"""

from __future__ import annotations

from driftguard.adapters.counters import CounterAdapter

VLLM = CounterAdapter(
    kind="vllm",
    name="vLLM",
    prefix="vllm:",
    steps="vllm:spec_decode_num_drafts_total",
    drafted="vllm:spec_decode_num_draft_tokens_total",
    accepted="vllm:spec_decode_num_accepted_tokens_total",
    accepted_per_position="vllm:spec_decode_num_accepted_tokens_per_pos_total",
    generated="vllm:generation_tokens_total",
    prompts="vllm:prompt_tokens_total",
    running="vllm:num_requests_running",
    waiting="vllm:num_requests_waiting",
    ttft="vllm:time_to_first_token_seconds",
    decode_seconds=("vllm:inter_token_latency_seconds_sum", "vllm:time_per_output_token_seconds_sum"),
    counts_as_it_goes=True,
    positions_are_k=True,
    show_metrics="start vLLM without --disable-log-stats",
    speculate="start vLLM with --speculative-config",
)

"""LMDeploy's PyTorch engine. Its gauges of acceptance are means since the server started: not used.

`time_per_output_token_seconds` observes once per step: since 0.10 the seconds of the step divided by its
tokens, whose mean is no time per token where steps have different numbers of them. `iter_token_latency`
(without a unit in its name) has the seconds of each step. Versions before 0.10 lack it, and made one token
per step.
"""

from __future__ import annotations

from driftguard.adapters.counters import CounterAdapter

LMDEPLOY = CounterAdapter(
    kind="lmdeploy",
    name="LMDeploy",
    prefix="lmdeploy:",
    steps="lmdeploy:spec_decode_num_drafts_total",
    drafted="lmdeploy:spec_decode_num_draft_tokens_total",
    accepted="lmdeploy:spec_decode_num_accepted_tokens_total",
    accepted_per_position="lmdeploy:spec_decode_num_accepted_tokens_per_pos_total",
    generated="lmdeploy:generation_tokens_total",
    prompts="lmdeploy:prompt_tokens_total",
    running="lmdeploy:num_requests_running",
    waiting="lmdeploy:num_requests_waiting",
    ttft="lmdeploy:time_to_first_token_seconds",
    decode_seconds=("lmdeploy:iter_token_latency_sum", "lmdeploy:time_per_output_token_seconds_sum"),
    show_metrics="start LMDeploy's api_server without --disable-metrics",
    speculate="start LMDeploy with --speculative-algorithm and --speculative-draft-model",
)

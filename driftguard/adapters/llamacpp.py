"""llama.cpp's server. The series of positions appear with the first draft; no metric names the model.

It prints its counters through a C++ stream of the default precision (tools/server/server-task.cpp), but not
those of positions.
"""

from __future__ import annotations

from driftguard.adapters.counters import CounterAdapter

LLAMACPP = CounterAdapter(
    kind="llamacpp",
    name="llama.cpp",
    prefix="llamacpp:",
    steps="llamacpp:spec_decode_num_drafts_total",
    drafted="llamacpp:spec_decode_num_draft_tokens_total",
    accepted="llamacpp:spec_decode_num_accepted_tokens_total",
    accepted_per_position="llamacpp:spec_decode_num_accepted_tokens_per_pos_total",
    generated="llamacpp:tokens_predicted_total",
    prompts="llamacpp:prompt_tokens_total",
    running="llamacpp:requests_processing",
    waiting="llamacpp:requests_deferred",
    decode_seconds=("llamacpp:tokens_predicted_seconds_total",),
    names_target=False,
    significant_digits=6,
    show_metrics="start llama-server with --metrics (and a build of August 2026 or later)",
    speculate="start llama-server with --spec-draft-model",
)

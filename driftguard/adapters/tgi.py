"""Hugging Face TGI. `tgi_request_skipped_tokens` observes the accepted draft tokens of every step.

Drafted tokens are not reported; they are estimated as steps x the configured --speculate, hence fidelity
gauge. The first step of a request drafts nothing and is counted too, so acceptance is too low by about 1 /
(steps of an answer).
"""

from __future__ import annotations

from collections.abc import Sequence

from driftguard.adapters.adapter import Kind
from driftguard.adapters.reading import Increase, Reading, sums_and_counts
from driftguard.adapters.window import Identity, Incomplete, Window
from driftguard.records import Fidelity

_SKIPPED, _PER_TOKEN = "tgi_request_skipped_tokens", "tgi_request_mean_time_per_token_duration"
_PROMPTS, _BATCH, _QUEUE = "tgi_request_input_length", "tgi_batch_current_size", "tgi_queue_size"
_COUNTERS = sums_and_counts(_SKIPPED, _PER_TOKEN, _PROMPTS)


class Tgi:
    kind: Kind = "tgi"
    name = "TGI"
    prefix = "tgi_"
    path = "/metrics"
    names = _COUNTERS | {_BATCH, _QUEUE}
    fidelity: Fidelity = "gauge"
    names_target = False
    show_metrics = "scrape the port of TGI's router (--prometheus-port moves its metrics)"
    speculate = "start TGI with --speculate"

    def windows(self, before: Reading, after: Reading, known: Identity) -> Sequence[Window]:
        steps_ever, kept_ever = after.total(f"{_SKIPPED}_count"), after.total(f"{_SKIPPED}_sum")
        if not steps_ever:
            return []
        increase = Increase.between(before, after, _COUNTERS)
        steps, kept = increase.whole(f"{_SKIPPED}_count") or 0, increase.whole(f"{_SKIPPED}_sum") or 0
        k = known.num_speculative_tokens
        if k is None and kept_ever:
            raise Incomplete(
                "TGI does not report how many tokens it drafts; set `num_speculative_tokens` to its "
                "--speculate"
            )
        speculates = bool(kept_ever) and k is not None
        return [
            Window(
                target=None,
                begun_at=increase.begun_at,
                ended_at=after.at,
                steps=steps if speculates else 0,
                drafted=steps * k if speculates and k else 0,
                accepted=kept,
                generated=steps + kept,
                fidelity=self.fidelity,
                speculated_before=bool(kept_ever),
                num_speculative_tokens=k,
                prompt_tokens=increase.whole(f"{_PROMPTS}_sum"),
                time_per_output_token_seconds=increase.mean(_PER_TOKEN),
                concurrency=after.whole(_BATCH),
                waiting_requests=after.whole(_QUEUE),
                started_requests=increase.whole(f"{_PROMPTS}_count"),
            )
        ]


TGI = Tgi()

"""The current state of each stream, and their number."""

from __future__ import annotations

from driftguard.metrics.labels import OTHER, STREAM
from driftguard.metrics.series import Series


class StreamMetrics:
    def __init__(self, series: Series) -> None:
        self.set_aside = series.gauge(
            "driftguard_streams_set_aside",
            "Streams in service whose fold failed so often that it is not tried again automatically.",
        )
        self.set_aside_since = series.gauge(
            "driftguard_stream_set_aside_since_timestamp_seconds",
            "Since when drift of a set-aside stream is not detected; of at most 100 streams, the "
            "longest first.",
            *STREAM,
        )
        self.last_arrival = series.gauge(
            "driftguard_stream_last_arrival_timestamp_seconds",
            "When the stream's newest record arrived, without canary probes.",
            *STREAM,
        )
        self.speedup = series.gauge(
            "driftguard_speculation_speedup_ratio",
            "Tokens per second with the stream's current speculation, as a multiple of those without; with a "
            "95% interval. At the current load; only where requests without speculation were timed at it.",
            *STREAM,
            "bound",  # estimate | low | high
        )
        self.speedup_by_load = series.gauge(
            "driftguard_speculation_speedup_by_load_ratio",
            "As driftguard_speculation_speedup_ratio, at each load at which requests with and without "
            "speculation were timed within a day.",
            *STREAM,
            "concurrency",  # requests at once, such as 9 to 16; unknown
            "bound",  # estimate | low | high
        )
        self.load = series.gauge(
            "driftguard_speculation_load_info",
            "1 for the load of the newest requests: how many requests run at once.",
            *STREAM,
            "concurrency",
        )
        self.info = series.gauge(
            "driftguard_stream_info",
            "1 for each stream, with its id, by which its page and the API know it.",
            *STREAM,
            "stream",
        )
        self.verdict = series.gauge(
            "driftguard_stream_verdict",
            "1 for the stream's current verdict; no series for the others.",
            *STREAM,
            "verdict",
        )
        self.verdict_since = series.gauge(
            "driftguard_stream_verdict_since_timestamp_seconds",
            "Since when the stream has its current verdict, where that is known: the change point of an "
            "incident, the last arrival of a stale source.",
            *STREAM,
        )
        self.baseline = series.gauge(
            "driftguard_acceptance_baseline_ratio",
            "Acceptance rate of the segment's baseline. Only of segments judged by all draft "
            "positions, so that it can be compared with the counters.",
            *STREAM,
            "segment",
        )
        self.tokens_per_second = series.gauge(
            "driftguard_stream_tokens_per_second",
            "Decoding speed of one request, 1 / mean time per output token: in the last five minutes (now), "
            "and in the two hours before them or before the open incident (before).",
            *STREAM,
            "period",  # now | before
        )
        self.k = series.gauge(
            "driftguard_stream_num_speculative_tokens",
            "K of most steps in the newest measured requests.",
            *STREAM,
        )
        self.best_k = series.gauge(
            "driftguard_stream_best_num_speculative_tokens",
            "K that would be fastest now; 0 is without speculation.",
            *STREAM,
        )
        self.break_even = series.gauge(
            "driftguard_stream_break_even_acceptance_ratio",
            "Acceptance rate at which the K in use is as fast as no speculation; above 1: none is enough.",
            *STREAM,
        )
        self.unrecorded = series.gauge(
            "driftguard_unrecorded_requests_ratio",
            "Part of a server's answered requests of the last 24 hours that is not recorded, by reason; "
            "the sum over the reasons is all of it. Only of servers with such requests, the largest part "
            "first, at most metrics.max_streams.",
            "server",
            "reason",
        )
        self.by_verdict = series.gauge(
            "driftguard_streams", "Streams with speculation by their current verdict.", "verdict"
        )
        self.left_out = series.gauge(
            "driftguard_metrics_streams_left_out",
            "Streams without series of their own, see metrics.max_streams: without gauges, and without "
            f"counters, whose traffic is counted together as {OTHER}.",
            "series",  # gauges | counters
        )
        self.left_out.labels("counters").set(0)

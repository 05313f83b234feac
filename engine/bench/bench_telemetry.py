"""What telemetry costs: tokens per second with and without it, in paired runs. Goal: at most 1% lost.

    python engine/bench/bench_telemetry.py [--target DIR --draft DIR] [--pairs 20]

Both runs of a pair do the same work (same prompts, same seeds) in one process; which comes first alternates.
The receiver is another process. Two ratios are printed, each the median over the pairs with its 95%
confidence interval: tokens per second of wall-clock time, and of this process's CPU time, all threads and the
sending of the last record included. Both vary by some percent with other load on the machine. The last line
hardly varies: the CPU time of telemetry itself, that is of all threads but the engine's own and of the engine
thread inside telemetry, as a share of the engine thread's. With one torch thread that is the whole cost of
telemetry, even where both share one core, except for its effect on the processor's caches.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from driftguard_engine.config import EngineConfig
from driftguard_engine.core import Request, SamplingParams
from driftguard_engine.engine import Engine
from driftguard_engine.options import BUNDLED
from driftguard_engine.telemetry.telemetry import Telemetry
from scipy.stats import binom

# It answers as a sidecar does.
RECEIVER = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        lines = self.rfile.read(int(self.headers["Content-Length"])).count(10)
        answer = b'{"accepted": %d, "duplicates": 0}' % lines
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""
SENT_WITHIN_SECONDS = 60.0
PROMPT = "def read(path):\n    with open(path) as file:\n        return file"


@dataclass(frozen=True, slots=True)
class Rates:
    """Output tokens per second of wall clock, and of this process's CPU time.

    telemetry: CPU time of all threads but the engine's, and of the engine thread inside telemetry, as a share
    of the engine thread's.
    """

    wall: float
    cpu: float
    telemetry: float


def measure(
    engine: Engine, telemetry: Telemetry, prompt: tuple[int, ...], requests: int, tokens: int
) -> Rates:
    """One run: `requests` sequences of `tokens` tokens each."""
    now = datetime.now(UTC)
    cpu_start, thread_start, start = time.process_time(), time.thread_time(), time.perf_counter()
    for number in range(requests):
        params = SamplingParams(max_tokens=tokens, seed=number, ignore_eos=True)
        engine.submit(Request(f"request-{number}", prompt, params, now))
    produced, inside = 0, 0.0
    while engine.has_work():
        for output in engine.step():
            produced += len(output.token_ids)
            if output.finished is not None:
                begun = time.thread_time()
                telemetry.finished(output.finished)
                inside += time.thread_time() - begun
    wall_seconds = time.perf_counter() - start
    thread_seconds = time.thread_time() - thread_start
    while telemetry.state.waiting_records:
        if time.perf_counter() - start > wall_seconds + SENT_WITHIN_SECONDS:
            raise SystemExit("the receiver does not take the records; the log gives the reason")
        time.sleep(0.1)
    cpu_seconds, all_thread_seconds = time.process_time() - cpu_start, time.thread_time() - thread_start
    telemetry_seconds = cpu_seconds - all_thread_seconds + inside
    return Rates(produced / wall_seconds, produced / cpu_seconds, telemetry_seconds / thread_seconds)


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """The ratios' median and its 95% confidence interval by order statistics: assumes no distribution.

    With n ratios and k the 2.5% quantile of Binomial(n, 1/2): from the k-th smallest to the k-th largest.
    """
    ordered = sorted(ratios)
    rank = max(1, int(binom.ppf(0.025, len(ordered), 0.5)))
    return median(ordered), ordered[rank - 1], ordered[-rank]


def run_pairs(engine: Engine, url: str, options: argparse.Namespace) -> list[tuple[Rates, Rates]]:
    """(with, without) of every pair."""
    prompt = tuple(engine.tokenizer.encode(PROMPT))

    def once(target_url: str | None) -> Rates:
        with tempfile.TemporaryDirectory() as spool:
            telemetry = Telemetry(target_url, Path(spool), "bench", engine.target_name)
            telemetry.start()
            measure(engine, telemetry, prompt, requests=1, tokens=1)  # opens the connection
            rates = measure(engine, telemetry, prompt, options.requests, options.tokens)
            telemetry.close()
            sent = telemetry.state.records.sent
            if target_url is not None and sent != options.requests + 1:
                raise SystemExit(f"the receiver took {sent} of {options.requests + 1} records")
        return rates

    runs: tuple[Callable[[], Rates], Callable[[], Rates]] = (lambda: once(url), lambda: once(None))
    for run in runs:
        run()  # warm up
    pairs = []
    for number in range(options.pairs):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        rates = {which: runs[which]() for which in order}
        pairs.append((rates[0], rates[1]))
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", default=str(BUNDLED / "target"), help="target model directory")
    parser.add_argument("--draft", default=str(BUNDLED / "draft"), help="draft model directory")
    parser.add_argument(
        "--pairs", type=int, default=20, help="pairs of runs; at least 6 for an interval of 95%%"
    )
    parser.add_argument("--requests", type=int, default=32, help="requests per run, one record each")
    parser.add_argument("--tokens", type=int, default=32, help="output tokens per request")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    options = parser.parse_args()
    engine = Engine(EngineConfig(target=options.target, draft=options.draft, threads=options.threads))
    receiver = subprocess.Popen([sys.executable, "-c", RECEIVER], stdout=subprocess.PIPE, text=True)
    try:
        port = receiver.stdout.readline().strip() if receiver.stdout else ""
        pairs = run_pairs(engine, f"http://127.0.0.1:{port}", options)
    finally:
        receiver.kill()
        receiver.wait()
    print(
        f"{options.pairs} pairs of {options.requests} requests of {options.tokens} tokens, "
        f"target {engine.target_name}"
    )
    for name, unit in (("wall", "second"), ("cpu", "CPU second")):
        sent, quiet = ([getattr(rates, name) for rates in side] for side in zip(*pairs, strict=True))
        ratio, low, high = interval([one / other for one, other in zip(sent, quiet, strict=True)])
        print(
            f"tokens per {unit}: {median(sent):.1f} with telemetry, {median(quiet):.1f} without; "
            f"ratio {ratio:.4f} (95% {low:.4f} .. {high:.4f})"
        )
    sent, quiet = ([rates.telemetry for rates in side] for side in zip(*pairs, strict=True))
    share, low, high = interval(sent)
    print(
        f"CPU time of telemetry: {share:.2%} of the engine thread's (95% {low:.2%} .. {high:.2%}); "
        f"switched off {median(quiet):.2%}"
    )


if __name__ == "__main__":
    main()

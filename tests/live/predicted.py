"""What the gate expects of requests that were served, to compare with what the server counted for them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.live.servers import TARGET, K

TokenIds = tuple[list[int], list[int]]  # of the prompt and of the answer


def acceptance(served: Sequence[TokenIds], draft: Path, temperature: float, directory: Path) -> float:
    """By the rule of a server that drafts the likeliest token."""
    traffic = directory / "served.jsonl"
    lines = [{"segment": "", "prompt_token_ids": prompt, "output_token_ids": out} for prompt, out in served]
    traffic.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    command = [sys.executable, "-m", "driftguard_training", "evaluate", "--target", str(TARGET)]
    command += ["--draft", str(draft), "--traffic", str(traffic), "--num-speculative-tokens", str(K)]
    command += ["--temperature", str(temperature), "--acceptance-rule", "match"]
    scored = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    (segment,) = scored["drafts"][0]["segments"]
    return float(segment["acceptance"])

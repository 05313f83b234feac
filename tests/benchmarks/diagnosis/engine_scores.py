"""What the registered pair would have drafted and accepted on the engine's answers, healthy and with each
fault: what the scoring of captured requests says of them. Kept below build/, as the answers are."""

from __future__ import annotations

import functools
import sys

import msgspec
from driftguard_training.drafts.kinds import load_draft
from driftguard_training.model_directories import load_model
from driftguard_training.serving import Score, score_batch
from driftguard_training.traffic import ServedRequest

from tests.benchmarks.diagnosis.engine_figures import BUNDLED, ROOT, Figures, K, figures

KEPT = ROOT / "build" / "diagnosis-scores.json"
TEMPERATURE = 1.0  # of all answers but those of the probes

Scores = dict[str, dict[str, list[Score]]]  # of a condition and a domain, in the order of its figures


@functools.cache
def scores() -> Scores:
    """Of every condition; computed where they are not kept, which takes some minutes."""
    if KEPT.exists():
        return msgspec.json.decode(KEPT.read_bytes(), type=Scores)
    found: Scores = {}
    for name, condition in figures().items():
        found[name] = {domain: _scored(of) for domain, of in condition.traffic.items()}
        print(f"scored, {name}", file=sys.stderr, flush=True)
    KEPT.write_bytes(msgspec.json.encode(found))
    return found


@functools.cache
def by_answer() -> dict[tuple[tuple[int, ...], tuple[int, ...]], Score]:
    """By prompt and output, which decide the score, whatever served them."""
    return {
        (one.prompt, one.output): score
        for name, condition in figures().items()
        for domain, of in condition.traffic.items()
        for one, score in zip(of, scores()[name][domain], strict=True)
    }


def _scored(of: list[Figures]) -> list[Score]:
    target = load_model(BUNDLED / "target", "target")
    draft = load_draft(BUNDLED / "draft", target)
    found: list[Score] = []
    for start in range(0, len(of), 8):
        asked = [
            ServedRequest(
                segment="",
                prompt_token_ids=list(one.prompt),
                output_token_ids=list(one.output),
                temperature=TEMPERATURE,
                num_speculative_tokens=K,
            )
            for one in of[start : start + 8]
        ]
        found += score_batch(target, draft, asked)
    return found


if __name__ == "__main__":
    scores()

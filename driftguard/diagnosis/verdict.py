"""A cause with its confidence, and what is said about it: summary, what to do, what would confirm it."""

from __future__ import annotations

from typing import Final, NamedTuple

from driftguard.diagnosis.evidence import Direction
from driftguard.records.documents.diagnosis import PROBE, Cause, Confidence

RETRAINABLE: Final[tuple[Cause, ...]] = ("query_drift", "target_replaced")


class Verdict(NamedTuple):
    """`detail` ends the summary. `is_fault`: of a cause that a new draft could follow, and must not: a target
    that nobody announced is to be looked at first."""

    cause: Cause
    confidence: Confidence
    reason: str
    detail: str = ""
    is_fault: bool = False

    @property
    def summary(self) -> str:
        return _SUMMARIES[self.cause] + self.detail

    def calls_for_a_draft(self, direction: Direction) -> bool:
        """Low confidence never does, nor does any fault of the engine."""
        known = self.cause in RETRAINABLE and self.confidence != "low" and not self.is_fault
        return direction == "down" and known

    def action(self, direction: Direction) -> str:
        """What to do. A rise is nothing to repair, but for answers that are suspect, or of another target."""
        if self.is_fault:
            return _EXCHANGED
        if direction == "up" and self.cause not in ("quality", "mix_shift", "unknown"):
            return "nothing to repair: acceptance rose"
        if self.cause in RETRAINABLE and self.confidence == "low":
            return _ACTIONS["unknown"]
        return _ACTIONS[self.cause]

    @property
    def confirmed_by(self) -> str:
        return _CONFIRMED_BY[self.cause]


_SUMMARIES: Final[dict[Cause, str]] = {
    "query_drift": "the traffic moved",
    "mix_shift": "only the mix of segments moved",
    "machine": "the machine or the engine, not the traffic",
    "engine_state": "the engine's state decays until it is restarted",
    "cache": "the prefix cache or the context length of the engine",
    "draft_wrong": "the draft that runs is not the one that was: not loaded, other weights, or quantised",
    "template": "the prompt template changed",
    "load": "only the load: tokens come slower, and as many are accepted",
    "configuration": "the configuration",
    "target_replaced": "the target was replaced",
    "quality": "looping or garbled output",
    "unknown": "the cause is not known",
}

_EXCHANGED: Final = (
    "find out why the target answers otherwise under the same name, and roll it back or announce it by "
    "another name; retraining would hide it"
)
_ACTIONS: Final[dict[Cause, str]] = {
    "query_drift": "retrain the draft on the new traffic",
    "mix_shift": "nothing to repair: every segment accepts as before",
    "machine": "restart the server or roll back what changed on it; retraining would not help",
    "engine_state": "restart the server, then update or pin the engine; retraining would not help",
    "cache": (
        "restart the server with its prefix cache off, or with shorter prompts, until the engine is mended; "
        "retraining would not help"
    ),
    "draft_wrong": "load the right draft weights again and restart the server; retraining would not help",
    "template": "put the earlier chat template back; retraining would not help",
    "load": "add capacity or draft fewer tokens under load; retraining would not help",
    "configuration": "check that it was meant, and let the baseline start anew; retraining would not help",
    "target_replaced": "retrain the draft against the new target",
    "quality": "read some answers: the output is suspect, not the speed",
    "unknown": f"replay the canary probes ({PROBE}), then look at the machine",
}
_CONFIRMED_BY: Final[dict[Cause, str]] = {
    "query_drift": f"{PROBE}: the canary probes are accepted as before",
    "mix_shift": "`driftguard status`: every segment is at its baseline",
    "machine": f"{PROBE} after a restart: the canary probes are accepted as before",
    "engine_state": f"{PROBE} before and right after a restart: the probes come back",
    "cache": (
        f"{PROBE} with the prefix cache off (vLLM: --no-enable-prefix-caching, SGLang: "
        "--disable-radix-cache) and on"
    ),
    "draft_wrong": "`sha256sum` of the draft's weights on the server, against those of the draft meant",
    "template": "`curl SERVER/tokenize` with a fixed conversation: the same tokens as before the change",
    "load": "`driftguard status` at a quiet hour: tokens per second are back, acceptance is as now",
    "configuration": "the engine's command line, against the one before the change",
    "target_replaced": "`sha256sum` of the target's weights on the server, against those before the change",
    "quality": "`curl SERVER/v1/completions` with a prompt of the segment: the answer repeats itself",
    "unknown": f"{PROBE}: whether the canary probes moved too",
}

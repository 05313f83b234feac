"""Why acceptance changed: the machine, the configuration, the mix, the queries. Pure.

    diagnosis = diagnose(evidence)

One file per kind of evidence; decision.py weighs them.
"""

from driftguard.diagnosis.decision import diagnose
from driftguard.diagnosis.evidence import Captured, EngineChange, Evidence, Observed, ProbeResult
from driftguard.records.documents.diagnosis import (
    CONFIDENCE_MEANS,
    CONFIDENCES,
    Cause,
    Confidence,
    Diagnosis,
    Fact,
)

__all__ = [
    "CONFIDENCES",
    "CONFIDENCE_MEANS",
    "Captured",
    "Cause",
    "Confidence",
    "Diagnosis",
    "EngineChange",
    "Evidence",
    "Fact",
    "Observed",
    "ProbeResult",
    "diagnose",
]

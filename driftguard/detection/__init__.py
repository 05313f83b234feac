"""Finds changes of acceptance with a stated false-alarm rate. Pure: no database, clock or network.

    state = StreamState()
    state, findings = fold(DetectorConfig(), state, batch)

One state per stream; a new draft version is a new stream, so it begins with a new baseline.
"""

from driftguard.detection.config import DetectorConfig
from driftguard.detection.findings import (
    AlarmWithheld,
    BaselineReady,
    BaselineReason,
    BaselineSettled,
    CloseReason,
    Direction,
    DriftClosed,
    DriftOpened,
    DriftSeenGradual,
    DriftWidened,
    ExpectedDelay,
    Finding,
    ProfileLearned,
    Scope,
    SegmentChange,
    SegmentSummary,
    SegmentVerdict,
    StreamSummary,
    Unit,
    Verdict,
)
from driftguard.detection.fleet import Fleet, Folded, fold_fleet
from driftguard.detection.fold import end_incident, fold, leave_incident
from driftguard.detection.fold_streams import fold_many
from driftguard.detection.observations import ObservationBatch
from driftguard.detection.operator import accept_new_normal, treat_as_usual
from driftguard.detection.state.codec import OtherVersion, UnreadableState
from driftguard.detection.state.stream_state import StreamState
from driftguard.detection.statistics.long_run_variance import OF_WINDOWS
from driftguard.detection.statistics.windows import WINDOW_REFERENCE
from driftguard.detection.summary import describe
from driftguard.records.documents.acceptance import Acceptance

__all__ = [
    "OF_WINDOWS",
    "WINDOW_REFERENCE",
    "Acceptance",
    "AlarmWithheld",
    "BaselineReady",
    "BaselineReason",
    "BaselineSettled",
    "CloseReason",
    "DetectorConfig",
    "Direction",
    "DriftClosed",
    "DriftOpened",
    "DriftSeenGradual",
    "DriftWidened",
    "ExpectedDelay",
    "Finding",
    "Fleet",
    "Folded",
    "ObservationBatch",
    "OtherVersion",
    "ProfileLearned",
    "Scope",
    "SegmentChange",
    "SegmentSummary",
    "SegmentVerdict",
    "StreamState",
    "StreamSummary",
    "Unit",
    "UnreadableState",
    "Verdict",
    "accept_new_normal",
    "describe",
    "end_incident",
    "fold",
    "fold_fleet",
    "fold_many",
    "leave_incident",
    "treat_as_usual",
]

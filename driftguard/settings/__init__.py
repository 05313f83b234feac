"""What can be set, where it is read from, and what of it is secret."""

from __future__ import annotations

from driftguard.settings.model import (
    ORDER_VARIABLES,
    PREFIX,
    URL_PATTERN,
    AlertingSettings,
    CaptureSettings,
    DetectionSettings,
    EngineSettings,
    FalseAlarmScope,
    HttpSettings,
    IngestSettings,
    ProbeSettings,
    ProbeTargetSettings,
    ProxySettings,
    RetentionSettings,
    RetrainingSettings,
    ScrapingSettings,
    Settings,
    SourceSettings,
)

__all__ = [
    "ORDER_VARIABLES",
    "PREFIX",
    "URL_PATTERN",
    "AlertingSettings",
    "CaptureSettings",
    "DetectionSettings",
    "EngineSettings",
    "FalseAlarmScope",
    "HttpSettings",
    "IngestSettings",
    "ProbeSettings",
    "ProbeTargetSettings",
    "ProxySettings",
    "RetentionSettings",
    "RetrainingSettings",
    "ScrapingSettings",
    "Settings",
    "SourceSettings",
]

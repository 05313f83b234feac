"""What one check found, and how to mend it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

State = Literal["ok", "warning", "failed"]
CLOCK_SECONDS: Final = 10.0  # by which two clocks may differ


@dataclass(frozen=True, slots=True)
class Finding:
    """`fix`: a command or a setting; empty where nothing has to be done."""

    check: str
    state: State
    found: str
    fix: str = ""


def clock(check: str, theirs: datetime, ours: datetime, tolerance_seconds: float = 0.0) -> Finding:
    """`tolerance_seconds`: within which their time is known."""
    ahead = (theirs - ours).total_seconds()
    if abs(ahead) <= CLOCK_SECONDS + tolerance_seconds:
        return Finding(check, "ok", f"within {CLOCK_SECONDS:g} s of this machine's")
    told = f"{abs(ahead):,.0f} s {'ahead of' if ahead > 0 else 'behind'} this machine's ({ours:%F %T} UTC)"
    return Finding(check, "warning", told, "synchronise both clocks: timedatectl set-ntp true")

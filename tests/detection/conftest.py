"""What tests of several parts of the detector share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from driftguard.detection.steps import dependence


@pytest.fixture(scope="module")
def no_stream_is_young() -> Iterator[None]:
    """Alarms wait for nothing: `confirmation.py` has tests of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dependence, "YOUNG", 0)
        patch.setattr(dependence, "YOUNG_DEPENDENT", 0)
        yield

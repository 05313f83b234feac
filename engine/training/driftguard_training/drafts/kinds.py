"""Which kind of draft is in a directory."""

from __future__ import annotations

from pathlib import Path

from driftguard_engine.models.eagle3_head import is_eagle3
from driftguard_engine.models.medusa_head import is_medusa

from driftguard_training.drafts.base import Draft
from driftguard_training.drafts.draft_model import DraftModel
from driftguard_training.drafts.eagle3_draft import Eagle3Draft
from driftguard_training.drafts.medusa_draft import MedusaDraft
from driftguard_training.model_directories import LoadedModel, check_model_directory


def load_draft(directory: Path, target: LoadedModel) -> Draft:
    """A draft model, an EAGLE-3 head or Medusa heads, as the engine would load it.

    Raises TrainingRefused: it cannot be read, or does not fit the target.
    """
    check_model_directory(directory, "draft")
    if is_medusa(directory):
        return MedusaDraft(directory, target)
    return Eagle3Draft(directory, target) if is_eagle3(directory) else DraftModel(directory, target)

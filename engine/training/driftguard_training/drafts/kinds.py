"""Which kind of draft is in a directory."""

from __future__ import annotations

from pathlib import Path

from driftguard_engine.core import InvalidModel
from driftguard_engine.models.medusa_head import is_medusa
from driftguard_engine.models.speculators import TITLES, head_kind

from driftguard_training.drafts.base import Draft
from driftguard_training.drafts.draft_model import DraftModel
from driftguard_training.drafts.eagle3_draft import Eagle3Draft
from driftguard_training.drafts.medusa_draft import MedusaDraft
from driftguard_training.errors import BadModelDirectory
from driftguard_training.model_directories import LoadedModel, check_model_directory


def load_draft(directory: Path, target: LoadedModel) -> Draft:
    """A draft model, an EAGLE-3 head or Medusa heads, as the engine would load it.

    Raises TrainingRefused: it cannot be read, or does not fit the target.
    """
    check_model_directory(directory, "draft")
    if is_medusa(directory):
        return MedusaDraft(directory, target)
    try:
        kind = head_kind(directory)
    except InvalidModel as error:
        raise BadModelDirectory(error.detail) from None
    if kind is None:
        return DraftModel(directory, target)
    if kind != "eagle3":
        raise BadModelDirectory(
            f"draft: {directory} is {TITLES[kind]}, and only draft models, EAGLE-3 and Medusa heads are "
            "trained and scored"
        )
    return Eagle3Draft(directory, target)

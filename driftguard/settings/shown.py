"""The settings as a page and a command may show them: without their secrets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

from pydantic import BaseModel

from driftguard.settings import Settings
from driftguard.settings.loading import describe_settings
from driftguard.settings.secrets import masked_command, secrets_of


@dataclass(frozen=True, slots=True)
class ShownSetting:
    """`name`: with dots. `value`: of a list of groups what differs from their defaults; -: none."""

    name: str
    value: str
    default: str
    meaning: str
    is_changed: bool


def shown(settings: Settings) -> Iterator[ShownSetting]:
    """Every setting."""
    masked, told = secrets_of(settings).masked, _without_arguments(settings)
    for name, default, meaning in describe_settings():
        value = reduce(getattr, name.split("."), told)
        yield ShownSetting(name, _text(value, masked), _text(default, masked), meaning, value != default)


def shown_as_json(settings: Settings) -> str:
    """All of them in one object, whose keys are no secrets."""
    of_all = _without_arguments(settings).model_dump(mode="json")
    return json.dumps(_masked(of_all, secrets_of(settings).masked), ensure_ascii=False)


def _without_arguments(settings: Settings) -> Settings:
    """With the program of the command alone: any of its arguments may be a secret."""
    rules = settings.retraining
    rules = rules.model_copy(update={"promote_command": masked_command(rules.promote_command)})
    return settings.model_copy(update={"retraining": rules})


def _text(value: object, mask: Callable[[str], str]) -> str:
    """A true is `true`, as in the file, and no `True`."""
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        value = [
            one.model_dump(mode="json", exclude_defaults=True) if isinstance(one, BaseModel) else one
            for one in value
        ]
    if isinstance(value, bool | list | dict):
        return json.dumps(_masked(value, mask), ensure_ascii=False)
    return mask(str(value))


def _masked(value: Any, mask: Callable[[str], str]) -> Any:
    if isinstance(value, dict):
        return {key: _masked(item, mask) for key, item in value.items()}
    if isinstance(value, list):
        return [_masked(item, mask) for item in value]
    return mask(value) if isinstance(value, str) else value

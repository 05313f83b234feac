"""Reads the settings: from the environment and one TOML file.

Environment: `DRIFTGUARD_` + the name in capitals, with `__` between levels, for example
`DRIFTGUARD_CAPTURE__ENABLED=true`.
The file: the path in `DRIFTGUARD_CONFIG`, or `--config`. The environment takes precedence over the
file. Unknown keys are refused by name, in both.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from difflib import get_close_matches
from json import JSONDecodeError
from pathlib import Path
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_settings import SettingsError

from driftguard.errors import BadSettings
from driftguard.settings import ORDER_VARIABLES, PREFIX, URL_PATTERN, Settings

CONFIG_VARIABLE = "DRIFTGUARD_CONFIG"
_ALIKE = 0.75  # of two names, from 0 to 1, for one to be taken for the other misspelt
# Of vLLM's plugin (driftguard_vllm/settings.py), which may run beside the sidecar in one environment.
PLUGIN_VARIABLES = {
    f"DRIFTGUARD_VLLM_{name}"
    for name in ("SIDECAR", "SERVER", "TARGET", "DRAFT", "DRAFT_VERSION", "CAPTURE_FRACTION")
}
RESERVED_VARIABLES = (
    ORDER_VARIABLES
    | PLUGIN_VARIABLES
    | {CONFIG_VARIABLE, "DRIFTGUARD_API_KEY", "DRIFTGUARD_CACHE_DIR", "DRIFTGUARD_SIDECAR"}
)


def load_settings(config: Path | None = None, **overrides: Any) -> Settings:
    """Reads overrides (command line), then the environment, then the TOML file; the first that has a value is
    used.

    Raises BadSettings: an unreadable file, an unknown key, or an invalid value; each by name.
    """
    config = config or (Path(named) if (named := os.environ.get(CONFIG_VARIABLE)) else None)
    given = {} if config is None else _read(config)
    if unknown := sorted(_unknown_variables()):
        names = [PREFIX + name.replace(".", "__").upper() for name in _names()]
        raise BadSettings("; ".join(_no_such(name, names) for name in unknown))

    class FromFile(Settings):
        in_file: ClassVar[dict[str, Any]] = given

    try:
        return FromFile(**{key: value for key, value in overrides.items() if value is not None})
    except ValidationError as error:
        raise BadSettings("; ".join(_readable(item) for item in error.errors())) from None
    except SettingsError as error:
        raise BadSettings(_not_json(error)) from None


def _read(path: Path) -> dict[str, Any]:
    """Once: what is in a pipe is gone then."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # editors of Windows write a mark
    except OSError as error:
        raise BadSettings(f"{path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadSettings(f"{path}: not valid TOML ({error})") from None
    known: dict[str, str] = {}
    for name in found:  # which is taken with capitals too; of two one would be left out without a word
        if (other := known.setdefault(name.lower(), name)) != name:
            raise BadSettings(
                f"{other} and {name}: one setting by two names; write both below {name.lower()}"
            )
    return found


def _unknown_variables() -> Iterator[str]:
    for name in os.environ:
        if name.startswith(PREFIX) and name not in RESERVED_VARIABLES:
            top = name.removeprefix(PREFIX).split("__")[0].lower()
            if top not in Settings.model_fields:
                yield name


def _not_json(error: SettingsError) -> str:
    cause = error.__cause__
    if not isinstance(cause, JSONDecodeError):
        return str(error)
    named = [
        name for name, value in os.environ.items() if name.startswith(PREFIX) and value == cause.doc
    ]  # the error does not tell which variable it was
    return f'{", ".join(named)}: not JSON ({cause}); lists and tables are JSON in variables, such as ["a"]'


def _names() -> list[str]:
    """Of settings and their groups."""
    names = [name for name, _, _ in describe_settings()]
    return [*dict.fromkeys(name.rpartition(".")[0] for name in names if "." in name), *names]


def _no_such(key: str, names: list[str]) -> str:
    alike = get_close_matches(key, names, n=1, cutoff=_ALIKE)
    guess = f" did you mean {alike[0]}?" if alike else ""
    return f"{key}: no such setting;{guess} `driftguard settings` lists them all"


def _no_such_in_table(loc: tuple[str | int, ...], at: int) -> str:
    """`at`: where in `loc` the number of the table is. `driftguard settings` does not tell what is in one."""
    group: Any = Settings
    for part in loc[:at]:
        kind = group.model_fields[part].annotation
        group = get_args(kind)[0] if get_args(kind) else kind
    names, key = list(group.model_fields), ".".join(map(str, loc))
    alike = get_close_matches(str(loc[at + 1]), names, n=1, cutoff=_ALIKE)
    guess = f" did you mean {alike[0]}?" if alike else ""
    return f"{key}: no such setting;{guess} [[{'.'.join(map(str, loc[:at]))}]] takes {', '.join(names)}"


def _readable(error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        table = next((at for at, part in enumerate(error["loc"]) if isinstance(part, int)), None)
        return _no_such(key, _names()) if table is None else _no_such_in_table(error["loc"], table)
    if error["type"] == "missing":
        return f"{key}: needed, but not set"
    if error["type"] == "value_error":  # of a whole group: its input would show keys
        return ": ".join(part for part in (key, str(error["ctx"]["error"])) if part)
    if error["type"] == "string_pattern_mismatch" and error["ctx"]["pattern"] == URL_PATTERN:
        return f"{key}: does not begin with http:// or https:// and a host{_given_url(key, error['input'])}"
    if error["type"] == "list_type" and isinstance(error["input"], dict):
        return f"{key}: is one table, not a list of them; TOML writes each of a list as [[{key}]]"
    told = error["msg"].partition(", unable to")[0]
    return f"{key}: {told[:1].lower()}{told[1:]}{_given(key, error['input'])}"


def _given(key: str, value: object) -> str:
    """The value that was given, unless it may be a secret, or hold one."""
    is_named = key.endswith(("key", "command")) or (isinstance(value, str) and "://" in value)
    return "" if is_named or not isinstance(value, str | int | float) else f", not {value!r}"


def _given_url(key: str, value: str) -> str:
    """As `_given`, without what names a receiver, or is a password, in the address of one."""
    host, slash, _ = value.partition("/")
    return "" if "@" in value or "://" in value else _given(key, host + (slash and "/..."))


def describe_settings(
    group: type[BaseModel] = Settings, prefix: str = ""
) -> Iterator[tuple[str, object, str]]:
    """Yields (dotted name, default, meaning) of every setting."""
    for name, field in group.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from describe_settings(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.get_default(call_default_factory=True), field.description or ""

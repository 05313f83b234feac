"""The drafter that CONTRIBUTING.md shows, installed as a package of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from driftguard_engine.config import DRAFTERS, EngineConfig, InvalidConfig
from driftguard_engine.core import InvalidModel
from driftguard_engine.engine import Engine
from driftguard_engine.options import BUNDLED, LimitOptions, ModelOptions, ServerOptions, engine_config

from tests.engine.core.tiny import plain_greedy, request, serve

GUIDE = Path(__file__).parents[3] / "CONTRIBUTING.md"


def install(site: Path, monkeypatch: pytest.MonkeyPatch, module: str, entry: str) -> None:
    """As pip does: a module, and its metadata beside it."""
    about = site / "bigram_drafter-1.2.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: bigram-drafter\nVersion: 1.2\n")
    (about / "entry_points.txt").write_text(f"[driftguard_engine.drafters]\n{entry}\n")
    (site / "bigram_drafter.py").write_text(module)
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(__import__("sys").modules, "bigram_drafter", raising=False)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = re.search(r"```python\n(.*?)```.*?```\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert shown is not None
    code, toml = shown.groups()
    assert len(code.splitlines()) <= 40
    header, entry = toml.strip().splitlines()
    assert header == '[project.entry-points."driftguard_engine.drafters"]'
    install(tmp_path, monkeypatch, code, entry.replace('"', ""))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.usefixtures("installed")
def test_it_drafts_and_greedy_output_is_plain_greedy_decoding(
    new_engine: Callable[..., Engine], ahead: bool
) -> None:
    engine = new_engine(drafter="bigram", draft=None, ahead=ahead)
    prompts = {"a": (7,), "b": (1, 2, 3, 4) * 5, "c": tuple(range(30, 60))}
    done = serve(engine, *(request(name, prompt, 60) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        assert done[name].output_token_ids == plain_greedy("llama", prompt, 60)
    assert sum(each.counts.accepted for each in done.values()) > 0
    info = done["a"].draft
    assert (info.name, info.version, info.method) == ("bigram", "bigram-drafter-1.2", "bigram")


@pytest.mark.usefixtures("installed")
def test_the_command_line_takes_it_by_name_and_gives_it_no_draft_of_its_own_accord() -> None:
    found = engine_config(ModelOptions(drafter="bigram"), LimitOptions(), ServerOptions())
    assert (found.drafter, found.draft, found.target) == ("bigram", None, str(BUNDLED / "target"))


@pytest.mark.usefixtures("installed")
def test_an_unknown_name_is_refused_with_those_that_there_are(models: Path) -> None:
    known = ", ".join((*DRAFTERS, "bigram"))
    with pytest.raises(InvalidConfig, match=f"drafter: 'trigram' is not one of {known}"):
        EngineConfig(str(models / "llama"), drafter="trigram")


@pytest.mark.parametrize(
    ("module", "told"),
    [
        ("import not_there", "ModuleNotFoundError: No module named 'not_there'"),
        ("def open_drafter(draft):\n    pass\n", "TypeError: open_drafter"),
        ("def open_drafter(*given):\n    return 3\n", "makes int, which is no"),
    ],
)
def test_a_package_that_makes_no_drafter_is_named(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, told: str
) -> None:
    install(tmp_path, monkeypatch, module, "bigram = bigram_drafter:open_drafter")
    with pytest.raises(InvalidModel, match=f"drafter: 'bigram' of bigram-drafter-1.2 .*{told}"):
        Engine(EngineConfig(str(models / "llama"), drafter="bigram"))

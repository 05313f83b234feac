"""What the build brings into the package."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hatch_build import NOTICE, STATIC, bring_uplot
from tests.deploy.committed import ROOT


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / STATIC).mkdir(parents=True)
    shutil.copy(ROOT / "LICENSE", tmp_path)
    return tmp_path


def test_uplot_comes_with_the_licence_of_its_holder(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path_factory.mktemp("site-packages")
    (place / "uplot" / "static").mkdir(parents=True)
    (place / "uplot" / "__init__.py").write_text("raise AssertionError('it is not imported')")
    (place / "uplot" / "static" / "uPlot.iife.js").write_text(
        "/**\n* Copyright (c) 2021, A Holder\n*/\nvar uPlot;\n"
    )
    (place / "uplot" / "static" / "uPlot.min.css").write_text(".uplot {}")
    monkeypatch.syspath_prepend(place)
    bring_uplot(checkout)
    assert (checkout / STATIC / "uPlot.js").read_text().endswith("var uPlot;\n")
    assert (checkout / STATIC / "uPlot.css").read_text() == ".uplot {}"
    notice = (checkout / STATIC / NOTICE).read_text().splitlines()
    assert notice[2] == "Copyright (c) 2021, A Holder"
    assert "DriftGuard" not in " ".join(notice)
    assert "Permission is hereby granted" in notice[4]


def test_a_build_without_uplot_says_what_is_missing(checkout: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"uPlot\.js, .* missing; install .* uplot-python"):
        bring_uplot(checkout)
    for name in ("uPlot.js", "uPlot.css", NOTICE):
        (checkout / STATIC / name).touch()
    bring_uplot(checkout)  # as in an sdist

"""What was compiled once is found again, and nothing else is ever loaded."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
from driftguard_engine.kernels.cuda import cubin_cache
from driftguard_engine.kernels.cuda.compiler import Compiled, Source
from driftguard_engine.kernels.cuda.cubin_cache import cache_directory, cubin

SOURCE = Source("a.cu", "kernel", (("b.cuh", "header"),))
DRIVER = 13000


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names and architectures that were compiled; the compiler itself is tested with the compiler."""
    done: list[str] = []

    def compile_source(source: Source, architecture: str) -> Compiled:
        done.append(f"{source.name} {architecture}")
        return Compiled(f"{source} {architecture}".encode() * 1000, log="")

    monkeypatch.setattr(cubin_cache, "compile_source", compile_source)
    return done


def test_compiles_once(compilations: list[str], tmp_path: Path) -> None:
    first = cubin(SOURCE, "sm_80", DRIVER, tmp_path)
    assert cubin(SOURCE, "sm_80", DRIVER, tmp_path) == first
    assert compilations == ["a.cu sm_80"]
    assert [path.suffix for path in tmp_path.iterdir()] == [".cubin"]


@pytest.mark.parametrize(
    ("source", "architecture", "driver", "compiler", "options"),
    [
        (Source("a.cu", "kernel 2", SOURCE.headers), "sm_80", DRIVER, "13.0", ()),
        (Source("a.cu", "kernel", (("b.cuh", "header 2"),)), "sm_80", DRIVER, "13.0", ()),
        (Source("a.cu", "kernelb.cuh", (("", "header"),)), "sm_80", DRIVER, "13.0", ()),
        (SOURCE, "sm_90a", DRIVER, "13.0", ()),
        (SOURCE, "sm_80", DRIVER + 10, "13.0", ()),
        (SOURCE, "sm_80", DRIVER, "13.1", ()),
        (SOURCE, "sm_80", DRIVER, "13.0", ("--fmad=true",)),
    ],
)
def test_compiles_again_for_whatever_differs(
    compilations: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: Source,
    architecture: str,
    driver: int,
    compiler: str,
    options: tuple[str, ...],
) -> None:
    monkeypatch.setattr(cubin_cache, "nvrtc_version", lambda: "13.0")
    monkeypatch.setattr(cubin_cache, "OPTIONS", ())
    cubin(SOURCE, "sm_80", DRIVER, tmp_path)
    monkeypatch.setattr(cubin_cache, "nvrtc_version", lambda: compiler)
    monkeypatch.setattr(cubin_cache, "OPTIONS", options)
    cubin(source, architecture, driver, tmp_path)
    assert len(compilations) == 2


@pytest.mark.parametrize("damage", ["cut", "changed", "emptied"])
def test_a_damaged_file_is_replaced(
    compilations: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    good = cubin(SOURCE, "sm_80", DRIVER, tmp_path)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    path.write_bytes({"cut": content[:-1], "changed": content[:-1] + b"\0", "emptied": b""}[damage])

    assert cubin(SOURCE, "sm_80", DRIVER, tmp_path) == good
    assert f"{path} is damaged" in caplog.text
    caplog.clear()
    assert cubin(SOURCE, "sm_80", DRIVER, tmp_path) == good
    assert len(compilations) == 2
    assert not caplog.text


def test_a_place_that_cannot_be_written(
    compilations: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "kernels"  # no permission stops root; a file instead of a directory does
    assert cubin(SOURCE, "sm_80", DRIVER, place)
    assert str(place) in caplog.text
    assert "set DRIFTGUARD_CACHE_DIR" in caplog.text


def test_a_full_disk_leaves_nothing_behind(
    compilations: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert cubin(SOURCE, "sm_80", DRIVER, tmp_path)
    assert "No space left" in caplog.text
    assert not list(tmp_path.iterdir())


def test_many_at_once(compilations: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found: list[bytes] = []
    barrier = threading.Barrier(8)

    def build() -> None:
        barrier.wait()
        found.extend(cubin(SOURCE, "sm_80", DRIVER, tmp_path) for _ in range(20))

    threads = [threading.Thread(target=build) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 160
    assert len(set(found)) == 1
    assert len(list(tmp_path.iterdir())) == 1
    assert not caplog.text


def test_where_it_is(
    compilations: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DRIFTGUARD_CACHE_DIR", "/named")
    monkeypatch.setenv("XDG_CACHE_HOME", "/user")
    assert cache_directory() == Path("/named/kernels")
    monkeypatch.delenv("DRIFTGUARD_CACHE_DIR")
    assert cache_directory() == Path("/user/driftguard/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/somebody")
    assert cache_directory() == Path("/somebody/.cache/driftguard/kernels")

    with caplog.at_level(logging.WARNING):
        assert cubin(SOURCE, "sm_80", DRIVER, None)
    assert "set DRIFTGUARD_CACHE_DIR" in caplog.text

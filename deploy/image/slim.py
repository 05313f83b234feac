"""Takes out of an image's virtual environment what nothing in it uses, and compiles part of what is left.

Run while an image is built, by the Python of /opt/driftguard. Fails, and with it the build, where a module of
DriftGuard cannot be imported from what is left. Sizes in MB are of the releases of November 2026.
"""

from __future__ import annotations

import importlib
import pkgutil
import py_compile
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Final

# scipy.stats, and what it imports itself: 54 of scipy's 83 MB.
SCIPY_KEPT: Final = frozenset(
    {"_external", "_lib", "constants", "fft", "integrate", "interpolate", "linalg", "ndimage", "optimize"}
    | {"sparse", "spatial", "special", "stats"}
)
WITHOUT_TORCH: Final = ("driftguard_engine", "driftguard_training")  # which need it; 14 MB with their models
# rich colours Python in tracebacks and nothing else here; the languages of the world are 4 MB.
LEXERS_KEPT: Final = frozenset({"__init__.py", "_mapping.py", "python.py", "special.py"})
IN_DEBIAN: Final = ("tzdata",)
TRIMMED: Final = ("numpy", "scipy")
DIRECTORIES: Final = ("tests",)
# What compilers read; extensions for numpy's own tests.
FILES: Final = ("*.a", "*.c", "*.f90", "*.h", "*.pxd", "*.pyi", "*.pyx")
EXTENSIONS: Final = ("_simd.*", "_*_tests.*")
# Symbols for debuggers are two thirds of these, 27 MB, and little elsewhere. The libraries that numpy and
# scipy bring beside them are broken by strip: "ELF load command address/offset not page-aligned".
STRIPPED: Final = ("aiohttp", "sqlalchemy", "uvloop")
IMPORTED: Final = ("driftguard", "driftguard_http", "driftguard_engine", "driftguard_training")
LATER: Final = ("scipy.stats",)  # imported by a function
NOT_IMPORTED: Final = ("driftguard.demo", "driftguard.__main__")  # needs the embedded database; starts
# Each MB of these saves the most at every start: 15 MB for 2 of 7 seconds.
COMPILED: Final = sys.stdlib_module_names | {"driftguard", "sqlalchemy"}


def main() -> None:
    site = Path(sysconfig.get_path("purelib"))
    has_torch = find_spec("torch") is not None
    for package in IN_DEBIAN if has_torch else IN_DEBIAN + WITHOUT_TORCH:
        shutil.rmtree(site / package)
    trim(site)
    strip(site)
    import_all()
    compile_imported(everything=has_torch)  # beside torch the caches are small


def trim(site: Path) -> None:
    for path in (site / "scipy").iterdir():
        if path.is_dir() and path.name not in SCIPY_KEPT:
            shutil.rmtree(path)
    for path in (site / "pygments" / "lexers").iterdir():
        if path.name not in LEXERS_KEPT:
            path.unlink()
    for package in TRIMMED:
        for name in DIRECTORIES:
            for directory in list((site / package).rglob(name)):
                shutil.rmtree(directory)
        for pattern in FILES + EXTENSIONS:
            for file in list((site / package).rglob(pattern)):
                file.unlink()


def strip(site: Path) -> None:
    for package in STRIPPED:
        subprocess.run(["strip", "--strip-unneeded", *(site / package).rglob("*.so")], check=True)


def import_all() -> None:
    for package in filter(find_spec, IMPORTED):
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if not module.name.startswith(NOT_IMPORTED):
                importlib.import_module(module.name)
    for name in LATER:
        importlib.import_module(name)


def compile_imported(*, everything: bool) -> None:
    """Where PYTHONPYCACHEPREFIX says, as the file system of a container may be read-only."""
    for name, module in list(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "")
        # torch.ops and torch.classes are objects that have a name of a file, but no file
        is_source = file.suffix == ".py" and file.is_absolute()
        if is_source and name != "__main__" and (everything or name.split(".")[0] in COMPILED):
            py_compile.compile(str(file), doraise=True)


if __name__ == "__main__":
    main()

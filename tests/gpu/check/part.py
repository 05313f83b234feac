"""Runs one part of a check in this process.

python -m tests.gpu.check.part verification --rows FILE --seconds 75

Exit status: 0 done, 2 there is no device to check, 3 the device is lost, 4 something of it failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from tests.gpu.check.parts import PARTS
from tests.gpu.check.run import DEVICE_LOST, FAILED, NO_DEVICE, NoDevice, Run, started


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    run = Run(options.rows, started + options.seconds)
    # A kernel that never ends cannot be interrupted by this process: it ends, and prints where it was.
    faulthandler.dump_traceback_later(options.seconds + 5, exit=True)
    module, name = PARTS[options.part].function.split(":")
    try:
        part: Callable[[Run], None] = getattr(import_module(module), name)
        part(run)
    except NoDevice as nothing:
        print(nothing, file=sys.stderr)
        return NO_DEVICE
    except Exception as problem:  # noqa: BLE001 - whatever breaks one part, the others are run
        run.fail(options.part, problem)
    finally:
        faulthandler.cancel_dump_traceback_later()
    if _device_is_lost():
        return DEVICE_LOST
    return FAILED if run.failed else 0


def _device_is_lost() -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError as lost:
        print(f"the device is lost: {str(lost).splitlines()[0]}", file=sys.stderr)
        return True
    return False


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.check.part",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

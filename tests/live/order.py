"""As `retraining.promote_command`: leaves the order in a file, and waits until it has been done.

`python -m tests.live.order FILE`; who restarts the server writes FILE.done, or why not into FILE.refused.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main() -> int:
    order = Path(sys.argv[1])
    done, refused = order.with_suffix(".done"), order.with_suffix(".refused")
    for old in (done, refused):
        old.unlink(missing_ok=True)
    members = {name: value for name, value in os.environ.items() if name.startswith("DRIFTGUARD_")}
    written = order.with_suffix(".part")
    written.write_text(json.dumps(members))
    written.rename(order)
    while not done.exists():
        if refused.exists():
            print(refused.read_text())
            return 1
        time.sleep(0.2)
    return 0


if __name__ == "__main__":
    sys.exit(main())

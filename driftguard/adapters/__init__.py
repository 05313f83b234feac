"""Makes acceptance records from the counts of serving engines: one file per engine.

Everything here is pure: text in, counts out. `driftguard.sources` fetches the text.
"""

from typing import Literal

ReplayFormat = Literal["records", "vllm-log", "sglang-log", "prometheus"]  # of the files that `replay` reads

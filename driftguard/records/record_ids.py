"""New record ids: UUIDs of version 7 (RFC 9562 §5.7), which begin with the time.

Ids that were made at about the same time are close together in the database's index, so that storing them
changes few index pages; random ids change one page each. docs/production.md has the numbers.
"""

from __future__ import annotations

import os
from random import Random
from time import time_ns
from typing import Final
from uuid import UUID

_VERSION: Final = 0x7 << 76
_VARIANT: Final = 0b10 << 62
_RANDOM_BITS: Final = 62

# A generator of its own: otherwise a program that calls random.seed() twice would make the same ids twice.
# os.urandom() would cost a system call for each id.
_random = Random()
if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_random.seed)


def new_record_id() -> UUID:
    """Unix milliseconds (48 bits), 4096ths of one (12 bits, RFC 9562 §6.2 method 3), 62 random bits.

    Later ids are greater as long as the clock goes forward. Safe in threads and in forked processes.
    """
    milliseconds, nanoseconds = divmod(time_ns(), 1_000_000)
    fraction = (nanoseconds << 12) // 1_000_000
    random_bits = _random.getrandbits(_RANDOM_BITS)
    return UUID(int=milliseconds << 80 | _VERSION | fraction << 64 | _VARIANT | random_bits)

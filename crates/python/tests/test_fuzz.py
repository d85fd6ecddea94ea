"""A small share of what `fuzz.py` makes by the million. MOEXPRESS_FUZZ_CALLS and MOEXPRESS_FUZZ_SEED ask for more, and for others."""

from __future__ import annotations

import os
from typing import Any

import fuzz
import fuzz_two

CALLS, SEED = int(os.environ.get("MOEXPRESS_FUZZ_CALLS", "6000")), int(os.environ.get("MOEXPRESS_FUZZ_SEED", "0"))


def test_no_argument_crashes_hangs_or_reads_memory_of_others() -> None:
    found = fuzz.run(CALLS, SEED)
    assert not found, "\n".join(found)


def test_nor_does_one_of_two_ranks(two: Any) -> None:
    calls = CALLS // 30
    for ends in two.run(fuzz_two.check, SEED, calls, limit=60 + calls):
        assert ends["returned"] > calls // 2, ends

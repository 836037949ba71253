"""How much the tests of this folder try: a tenth of their cases, or all of them where NANOINFER_TESTS=thorough.

The quick form is for every save of a file: the same cases each time, in under three seconds in all. `scripts/test` runs
the thorough form. Only repeated cases thin out, random examples and exhaustive loops: no test is left out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

THOROUGH = os.environ.get("NANOINFER_TESTS", "quick") == "thorough"
ONE_IN = 1 if THOROUGH else 10


def examples(thorough: int) -> int:
    """How many random examples to try, where the thorough form tries so many."""
    return max(thorough // ONE_IN, 3)


def some(cases: Sequence[T]) -> Sequence[T]:
    """Every tenth case of an exhaustive loop from the first one on, or all of them."""
    return cases[::ONE_IN]

"""Random examples: the same ones each time in the quick form, new ones in each run of the thorough form."""

from __future__ import annotations

import gc

from hypothesis import settings
from thoroughness import THOROUGH, examples

# No deadline: on a busy machine a slow example says nothing about the code.
settings.register_profile("thorough", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=examples(100), derandomize=True, database=None)
settings.load_profile("thorough" if THOROUGH else "quick")

# Modules and collected tests stay to the end: looking for garbage among them again and again would cost a lot of time.
# The quick form ends before its own garbage matters.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    if THOROUGH:
        gc.enable()

"""How long OpenMP's threads, which torch and numba use on a CPU, wait for each other awake."""

from __future__ import annotations

import os

# Turns of libgomp's waiting loop, a few microseconds: decision 023 has what was measured.
_SPIN_COUNT = "2000"


def wait_briefly() -> None:
    """Let threads that wait go to sleep soon, unless the user has said otherwise. Comes before torch is imported.

    libgomp's own default is to stay awake for milliseconds. On a machine with other work this is the time in which the
    thread that is waited for could have run.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)

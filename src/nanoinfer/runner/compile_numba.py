"""Numba's kernels are imported and compiled while the weights load, which mostly waits for the disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

from nanoinfer.errors import ConfigError
from nanoinfer.kernels.kernel_set import KernelSet
from nanoinfer.kernels.numba_set import NumbaKernels


class NumbaCompilation:
    """Compilation under way in a thread; nothing for other kernel sets."""

    def __init__(self, kernels: KernelSet, *, required: bool) -> None:
        """required: an error of numba is the user's, instead of a reason to do without."""
        self._kernels = kernels if isinstance(kernels, NumbaKernels) else None
        self._required = required
        self._result: Future[None] | None = None
        if self._kernels is not None:
            self._result = Future()
            # A daemon: a program that is told to end while this compiles must not wait for half a minute.
            threading.Thread(target=_compile, args=(self._kernels, self._result), name="numba", daemon=True).start()

    def wait(self, on_wait: Callable[[str], None] | None) -> str | None:
        """Until it is done; why numba cannot be used, or None. ConfigError instead where it was asked for.

        `on_wait` hears every half second what is waited for.
        """
        if self._kernels is None or self._result is None:
            return None
        while on_wait and wait([self._result], timeout=0.5).not_done:
            on_wait("compiling the CPU's kernels, which only a first start does")
        error = self._result.exception()
        if error is None:
            self._kernels.use_threads()
            return None
        reason = (
            f"numba does not work here: {str(error).strip().splitlines()[0] if str(error) else type(error).__name__}"
        )
        if self._required:
            raise ConfigError(f"{reason}; repair it, or use --kernels auto.") from error
        return reason


def _compile(kernels: NumbaKernels, result: Future[None]) -> None:
    try:
        kernels.compile()
    except BaseException as error:
        result.set_exception(error)
    else:
        result.set_result(None)

"""Sets up the CUDA context in a thread while torch is being imported, which takes longer. No torch here."""

from __future__ import annotations

import ctypes
import os
import threading


def wake_gpu(device: str) -> None:
    """Start on `device` (auto, cuda, cuda:N or cpu) and return at once. Without a driver nothing happens.

    The primary context is the one that torch uses; whatever fails here, torch reports.
    """
    if device != "cpu":
        # torchrun gives each rank of a host a GPU of its own, from this one on.
        index = int(device.partition(":")[2] or 0) + int(os.environ.get("LOCAL_RANK") or 0)
        threading.Thread(target=_retain_context, args=(index,), daemon=True).start()


def _retain_context(index: int) -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(handle), index) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)

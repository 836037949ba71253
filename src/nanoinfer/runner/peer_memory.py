"""Memory of one GPU that other processes of the same host write: CUDA's inter-process handles, through the driver.

torch's own symmetric memory needs a registered process group, and counts its exchanges per process, so two engines in
one process with different peers would wait for each other (decision 096). Source: CUDA Driver API, "Unified Addressing"
and cuIpc*.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack

import torch
from torch import Tensor

from nanoinfer.layers.group import Group

HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
LAZY_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * HANDLE_BYTES)]


class PeerMemory:
    """A zeroed buffer on this rank's GPU, and the addresses of those of all ranks. All ranks must construct it.

    `addresses` is None on every rank if any of them cannot reach another's memory.
    """

    def __init__(self, group: Group, nbytes: int, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._own = 0
        self._opened: list[int] = []
        self.addresses: list[int] | None = None
        handle = bytearray(HANDLE_BYTES)
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
            self._own = self._allocate(nbytes)
            handle = self._handle_of(self._own)
        except OSError:  # also where the driver refuses: it is then zeros that the others cannot open
            pass
        handles = group.all_gather(torch.tensor(list(handle), dtype=torch.uint8, device=device))
        addresses = self._open_all(handles, group.rank)
        if group.all_reduce_min(int(addresses is not None)):
            self.addresses = addresses

    def close(self) -> None:
        """Give the memory back. No kernel may use it any more.

        It may be freed only when nobody has it open: rank 0 comes last, the others leave theirs to the process's end.
        """
        opened, own = self._opened, self._own
        self._opened, self._own = [], 0
        with torch.cuda.device(self._device), ExitStack() as stack:  # all of it, also where the driver refuses
            if own and self._group.rank == 0:
                stack.callback(self._call, "cuMemFree_v2", ctypes.c_uint64(own))
            for address in opened:
                stack.callback(self._call, "cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def _allocate(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(nbytes))
        torch.cuda.synchronize(self._device)
        return address.value

    def _handle_of(self, address: int) -> bytearray:
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytearray(handle.bytes)

    def _open_all(self, handles: Tensor, rank: int) -> list[int] | None:
        addresses = []
        for i, row in enumerate(handles.tolist()):
            if i == rank:
                addresses.append(self._own)
                continue
            address = ctypes.c_uint64()
            handle = _Handle((ctypes.c_ubyte * HANDLE_BYTES)(*row))
            flags = ctypes.c_uint(LAZY_ENABLE_PEER_ACCESS)
            try:
                self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, flags)
            except OSError:
                return None
            self._opened.append(address.value)
            addresses.append(address.value)
        return addresses if self._own else None

    def _call(self, name: str, *arguments: object) -> None:
        """OSError if the driver answers with an error. The device's context must be current."""
        code = getattr(self._driver, name)(*arguments)
        if code != 0:
            raise OSError(f"{name} failed with CUDA error {code}")

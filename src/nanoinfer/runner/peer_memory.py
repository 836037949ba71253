"""Memory of one GPU that other processes of the same host write: CUDA's inter-process handles, through the driver.

torch's own symmetric memory needs a registered process group, and counts its exchanges per process, so two engines in
one process with different peers would wait for each other (decision 096). Source: CUDA Driver API, "Unified Addressing"
and cuIpc*.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack

import torch

from nanoinfer.layers.group import Group

HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
LAZY_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
BUS_ID_BYTES = 16


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * HANDLE_BYTES)]


class PeerMemory:
    """A zeroed buffer on this rank's GPU, and the addresses of those of all ranks. All ranks must construct it.

    `addresses` is None on every rank, and there is nothing to close, if any of them cannot reach another's memory by
    NVLink. Only that has atomic operations between GPUs (the driver says whether), and delivers 128 bytes whole.
    """

    def __init__(self, group: Group, nbytes: int, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._own = 0
        self._opened: list[int] = []
        self.addresses: list[int] | None = None
        message = bytes(HANDLE_BYTES + BUS_ID_BYTES)
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
            self._own = self._allocate(nbytes)
            message = self._handle_of(self._own) + self._bus_id()
        except OSError:  # also where the driver refuses: it is then zeros that the others cannot open
            pass
        messages = group.all_gather(torch.tensor(list(message), dtype=torch.uint8, device=device))
        addresses = self._open_all([bytes(row) for row in messages.tolist()], group.rank)
        if group.all_reduce_min(int(addresses is not None)):
            self.addresses = addresses
            return
        self._close_opened()
        group.all_reduce_min(0)  # nobody has another's open any more
        self._free_own()

    def close(self) -> None:
        """Give the memory back. No kernel may use it any more.

        It may be freed only when nobody has it open: rank 0 comes last, the others leave theirs to the process's end.
        """
        with torch.cuda.device(self._device), ExitStack() as stack:  # all of it, also where the driver refuses
            if self._group.rank == 0:
                stack.callback(self._free_own)
            stack.callback(self._close_opened)

    def _close_opened(self) -> None:
        opened, self._opened = self._opened, []
        with ExitStack() as stack:
            for address in opened:
                stack.callback(self._call, "cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def _free_own(self) -> None:
        own, self._own = self._own, 0
        if own:
            self._call("cuMemFree_v2", ctypes.c_uint64(own))

    def _allocate(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(nbytes))
        torch.cuda.synchronize(self._device)
        return address.value

    def _handle_of(self, address: int) -> bytes:
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle.bytes)

    def _bus_id(self) -> bytes:
        """Which device this is, by a name that does not depend on what a process sees."""
        name, device = ctypes.create_string_buffer(BUS_ID_BYTES), ctypes.c_int()
        self._call("cuCtxGetDevice", ctypes.byref(device))
        self._call("cuDeviceGetPCIBusId", name, ctypes.c_int(BUS_ID_BYTES), device)
        return name.raw

    def _is_linked(self, bus_id: bytes) -> bool:
        """OSError where the device of that name is hidden from this process."""
        own, other, value = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._call("cuCtxGetDevice", ctypes.byref(own))
        self._call("cuDeviceGetByPCIBusId", ctypes.byref(other), ctypes.c_char_p(bus_id))
        self._call("cuDeviceGetP2PAttribute", ctypes.byref(value), ctypes.c_int(NATIVE_ATOMICS), own, other)
        return bool(value.value)

    def _open_all(self, messages: list[bytes], rank: int) -> list[int] | None:
        if not self._own:
            return None
        addresses = []
        for i, message in enumerate(messages):
            if i == rank:
                addresses.append(self._own)
                continue
            address = ctypes.c_uint64()
            handle = _Handle((ctypes.c_ubyte * HANDLE_BYTES)(*message[:HANDLE_BYTES]))
            flags = ctypes.c_uint(LAZY_ENABLE_PEER_ACCESS)
            try:
                if not self._is_linked(message[HANDLE_BYTES:]):
                    return None
                self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, flags)
            except OSError:
                return None
            self._opened.append(address.value)
            addresses.append(address.value)
        return addresses

    def _call(self, name: str, *arguments: object) -> None:
        """OSError if the driver answers with an error. The device's context must be current."""
        code = getattr(self._driver, name)(*arguments)
        if code != 0:
            raise OSError(f"{name} failed with CUDA error {code}")

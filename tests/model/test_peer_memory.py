"""Which GPUs exchange through each other's memory, on a driver that a test plays."""

from __future__ import annotations

import ctypes

import pytest
import torch

from nanoinfer.layers.group import Group
from nanoinfer.models.partition import Partition
from nanoinfer.runner import peer_memory
from nanoinfer.runner.peer_memory import PeerMemory

DEVICES = {b"0000:17:00.0": 0, b"0000:65:00.0": 1}


class Driver:
    """Of rank 0, on device 0. `links`: whether another device is reached by NVLink; `fails`: functions that do."""

    def __init__(self, *, link=1, fails=()):
        self.link, self.fails, self.calls = link, fails, []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            return 700 if name in self.fails else self.answer(name, *arguments)

        return call

    def answer(self, name, *arguments):
        match name:
            case "cuMemAlloc_v2":
                arguments[0]._obj.value = 4096
            case "cuIpcOpenMemHandle_v2":
                arguments[0]._obj.value = 8192
            case "cuCtxGetDevice":
                arguments[0]._obj.value = 0
            case "cuDeviceGetPCIBusId":
                arguments[0].raw = next(iter(DEVICES)).ljust(arguments[1].value, b"\0")
            case "cuDeviceGetByPCIBusId":
                if arguments[1].value not in DEVICES:
                    return 101  # CUDA_ERROR_INVALID_DEVICE
                arguments[0]._obj.value = DEVICES[arguments[1].value]
            case "cuDeviceGetP2PAttribute":
                assert [argument.value for argument in arguments[1:]] == [3, 0, 1]
                arguments[0]._obj.value = self.link
        return 0


class Pair(Group):
    """Rank 0 of two, whose peer is on the device of this name."""

    def __init__(self, peer=b"0000:65:00.0"):
        super().__init__(Partition(0, 2), 2)
        self.peer = peer.ljust(peer_memory.BUS_ID_BYTES, b"\0")

    def all_gather(self, x):
        self.can_be_opened = bool(x.any())
        theirs = torch.tensor(list(bytes(peer_memory.HANDLE_BYTES) + self.peer), dtype=torch.uint8)
        return torch.stack((x, theirs))

    def all_reduce_min(self, value):
        return min(value, self.can_be_opened)


@pytest.fixture
def memory(monkeypatch):
    def make(driver, group):
        monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        return PeerMemory(group, 1 << 20, torch.device("cpu"))

    return make


def test_gpus_with_nvlink_open_each_others_memory(memory):
    driver = Driver()
    assert memory(driver, Pair()).addresses == [4096, 8192]
    assert "cuMemFree_v2" not in driver.calls


@pytest.mark.parametrize(
    ("driver", "group"),
    [
        (Driver(link=0), Pair()),  # over PCIe a line may arrive in pieces
        (Driver(), Pair(peer=b"0000:ff:00.0")),  # hidden from this process
        (Driver(fails=("cuIpcOpenMemHandle_v2",)), Pair()),
        (Driver(fails=("cuIpcGetMemHandle",)), Pair()),
    ],
    ids=["no NVLink", "hidden", "not opened", "no handle"],
)
def test_others_do_not_and_keep_nothing(memory, driver, group):
    assert memory(driver, group).addresses is None
    assert driver.calls[-1] == "cuMemFree_v2"


def test_without_memory_nothing_is_opened(memory):
    driver = Driver(fails=("cuMemAlloc_v2",))
    assert memory(driver, Pair()).addresses is None
    assert "cuIpcOpenMemHandle_v2" not in driver.calls
    assert "cuMemFree_v2" not in driver.calls

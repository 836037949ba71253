"""The machine's report: what is there, and why the rest is not in use."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from nanoinfer.errors import ConfigError
from nanoinfer.runner import machine
from nanoinfer.runner.build import resolve_device


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    facts = dict(machine.machine_facts())
    assert facts["CUDA"] == "not in use: this torch is built without CUDA"
    assert facts["flash-attn"] == "not in use: it needs a CUDA device"
    assert facts["Triton"] == "not in use: it needs a CUDA device"
    assert facts["default"].startswith("cpu, float32, ")
    assert not any(name.startswith("GPU") for name in facts)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert machine.cuda_fact().startswith("not in use: torch is built for 12.8, but finds no GPU")


def test_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    one = SimpleNamespace(name="Some GPU", total_memory=80 << 30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: one)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    facts = dict(machine.machine_facts())
    assert (facts["CUDA"], facts["GPU 1"]) == ("12.8", "Some GPU, 80.0 GiB, compute capability 9.0")
    assert facts["default"].startswith("cuda, bfloat16, ")
    assert facts["numba"] == "not in use: the device is a GPU"


@pytest.mark.parametrize(
    ("choice", "gpus", "built_for", "message"),
    [
        ("cuda", 0, None, "device 'cuda' is not there: this torch is built without CUDA; use --device cpu or auto."),
        ("cuda:0", 0, "12.8", "device 'cuda:0' is not there: torch sees no CUDA device; use --device cpu or auto."),
        ("cuda:1", 1, "12.8", "device 'cuda:1' is not there: torch sees cuda:0 only; use --device cpu or auto."),
        ("cuda:7", 2, "12.8", "device 'cuda:7' is not there: torch sees cuda:0 to cuda:1; use --device cpu or auto."),
    ],
)
def test_a_gpu_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, choice: str, gpus: int, built_for: str | None, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    with pytest.raises(ConfigError) as error:
        resolve_device(choice)
    assert str(error.value) == message
    if gpus:
        assert str(resolve_device(f"cuda:{gpus - 1}")) == f"cuda:{gpus - 1}"

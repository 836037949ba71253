"""The measured ceilings of a device: what is timed, and that no unit is off by a thousand."""

from __future__ import annotations

import pytest
import torch

from nanoinfer.runner import device_limits


def test_a_cpus_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_limits, "SPEND_S", 0.01)
    monkeypatch.setattr(device_limits, "CPU_COPY_BYTES", 1 << 22)
    monkeypatch.setattr(device_limits, "CPU_PRODUCT", 128)
    limits = device_limits.measure_limits("cpu", "bfloat16")
    assert limits.threads == torch.get_num_threads()
    assert limits.memory_bytes > 1 << 28
    assert limits.name
    # Slower than any machine in use, faster than none that exists: a factor of 1000 in a unit would show.
    assert 1e8 < limits.copy_bytes_per_s < 1e13
    assert 1e8 < limits.flops_per_s < 1e14


def test_the_best_of_several_calls_counts_and_the_first_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 0.1, 1.0, 1.02, 2.0, 2.1])  # began and ended: 0.1, 0.02 and 0.1 seconds
    monkeypatch.setattr(device_limits.time, "perf_counter", lambda: next(ticks))
    calls: list[int] = []
    seconds = device_limits._best_seconds(lambda: calls.append(1), torch.device("cpu"))
    assert seconds == pytest.approx(0.02)
    assert len(calls) == 1 + 3  # spending stops when 0.15 seconds have gone

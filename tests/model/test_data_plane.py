"""What is decided between an EngineConfig and a running data plane, as far as it can be told without a GPU."""

from __future__ import annotations

import gc
import os
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nanoinfer.config import EngineConfig
from nanoinfer.engine.batch import CompletedStep, StepResult
from nanoinfer.errors import EngineError, MemoryBudgetError
from nanoinfer.kernels.kernel_set import EAGER
from nanoinfer.models.config import ModelConfig
from nanoinfer.runner import build, memory, worst_step
from nanoinfer.runner.executor import LocalExecutor
from nanoinfer.runner.overlapped_runner import PendingStep, StepClock

CUDA = torch.device("cuda")
MODEL = ModelConfig.from_dict(
    {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    },
    source="test",
)  # fmt: skip


def pool_plan(**options) -> build.PoolPlan:
    return build.PoolPlan(EngineConfig(**options), MODEL, "bfloat16", 1 << 20, 64)


@pytest.mark.parametrize("options", [{"num_blocks": 1 << 20}, {"kv_memory": 8 << 30}])
def test_a_given_pool_that_does_not_fit_the_gpu_is_refused_before_the_load_with_the_numbers(options, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 << 30, 8 << 30))
    with pytest.raises(MemoryBudgetError, match=r"KV pool .* GiB .*2\.00 GiB available"):
        pool_plan(**options).geometry_before_load(CUDA)


def test_a_given_pool_that_fits_needs_no_profiling_run_and_an_open_one_does(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 << 30, 8 << 30))
    given = pool_plan(num_blocks=100).geometry_before_load(CUDA)
    assert given is not None
    assert given.num_blocks == 100
    assert pool_plan().geometry_before_load(CUDA) is None


def test_pool_of_full_rows_can_still_keep_prefixes():
    """Rounding once left fewer blocks than full rows need, and none for prefixes of sequences that ended."""
    pool = memory.plan_kv_pool(bytes_per_token=1, block_size=16, budget=1 << 30, max_num_seqs=8, max_model_len=17)
    assert pool.num_blocks == 2 * 8 * 2


def test_a_model_of_any_length_starts_with_what_the_pool_holds():
    """The table of rotations was made for all positions that config.json names, however many."""
    model = replace(MODEL, max_position_embeddings=1_000_000_000)
    config = EngineConfig(kernels="eager", num_blocks=100)
    plane = build.build_data_plane(config, model, torch.device("cpu"), load=lambda slots: None)
    assert plane.max_model_len == 1_000_000_000
    assert plane.geometry.num_blocks == 100


def test_memory_is_assumed_where_the_system_has_no_sysconf(monkeypatch):
    monkeypatch.delattr(os, "sysconf")
    assert 0 < memory.usable_memory() <= memory.ASSUMED_MEMORY


@pytest.mark.parametrize(("attention", "kernels"), [(True, False), (False, True), (True, True)])
def test_only_steps_that_never_wait_for_the_device_become_graphs(attention, kernels):
    """Eager kernels under Triton attention once synchronised inside a capture."""
    parts = SimpleNamespace(reads_device_only=attention), SimpleNamespace(reads_device_only=kernels)
    assert build.can_graph(EngineConfig(), *parts) == (attention and kernels)
    assert not build.can_graph(EngineConfig(enforce_eager=True), *parts)


def test_eager_kernels_are_not_captured():
    assert not EAGER.reads_device_only


def test_reserve_for_graphs_covers_their_logits_and_activations():
    shape = {"hidden_size": 4096, "intermediate_size": 12288, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    config = SimpleNamespace(vocab_size=151_936, **shape)
    gate_up, residual = 2 * 12288, 4096
    largest = 256 * 151_936 * 4 + 4096 * 2 * (gate_up + residual)
    assert largest + (256 << 20) <= worst_step.graph_reserve(config, 256, 8192) <= 3 * largest
    assert worst_step.graph_reserve(config, 256, 512) < worst_step.graph_reserve(config, 256, 8192)


class Runner:
    def launch(self, batch):
        return CompletedStep(StepResult([]))


def test_close_lets_the_runner_go():
    runner = Runner()
    gone = weakref.ref(runner)
    executor = LocalExecutor(runner)
    del runner
    gc.disable()
    try:
        executor.close()
        executor.close()
        assert gone() is None
    finally:
        gc.enable()


def test_error_of_a_step_under_way_is_an_engine_error(monkeypatch):
    def fail(clock):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    step = PendingStep(None, None, StepClock(torch.device("cpu")), used_graph=False)
    monkeypatch.setattr(StepClock, "wait", fail)
    with pytest.raises(EngineError, match="illegal memory access"):
        step.result()

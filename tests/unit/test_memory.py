"""Memory arithmetic: what a budget is on a CPU and on a GPU, how a pool follows from it, and what refusals say."""

from __future__ import annotations

import re

import pytest

from nanoinfer.errors import MemoryBudgetError
from nanoinfer.models.config import ModelConfig
from nanoinfer.runner.memory import (
    GIB,
    available_memory,
    cpu_kv_budget,
    gpu_kv_budget,
    plan_kv_pool,
    require_memory,
    usable_memory,
)

CONFIG = ModelConfig.from_dict(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
    source="test",
)


def test_small_machine_gives_a_quarter_and_a_large_one_4_gib():
    assert cpu_kv_budget(8 * GIB) == 2 * GIB
    assert cpu_kv_budget(16 * GIB) == 4 * GIB
    assert cpu_kv_budget(512 * GIB) == 4 * GIB


def test_available_memory_is_some_but_not_more_than_usable():
    assert 0 < available_memory() <= usable_memory()


GPU = {
    "total": 80 * GIB,
    "utilization": 0.9,
    "free_now": 60 * GIB,
    "current": 16 * GIB,
    "peak": 20 * GIB,
    "non_torch": GIB,
}


def test_gpu_pool_gets_the_share_less_what_the_process_holds_at_its_worst():
    assert gpu_kv_budget(**GPU | {"free_now": 63 * GIB}) == 51 * GIB  # .9 * 80 - (1 + 20)


def test_another_process_on_the_gpu_leaves_less():
    """30 GiB are in use by someone else: what is free, less what a step will take again, is all that is left."""
    assert gpu_kv_budget(**GPU | {"free_now": 33 * GIB}) == 29 * GIB


def test_what_others_hold_is_not_counted_twice():
    """As long as the share fits in what is free, another process takes nothing away from it."""
    assert gpu_kv_budget(**GPU | {"utilization": 0.5, "free_now": 33 * GIB}) == 19 * GIB


def test_graphs_take_their_reserve_from_either_limit():
    for free in (33, 63):
        whole = gpu_kv_budget(**GPU | {"free_now": free * GIB})
        assert gpu_kv_budget(**GPU | {"free_now": free * GIB}, graph_reserve=GIB) == whole - GIB


def test_model_that_fills_the_gpu_leaves_no_budget():
    assert gpu_kv_budget(**GPU | {"peak": 79 * GIB, "current": 75 * GIB, "free_now": 4 * GIB}) <= 0


ENGINE = {"max_num_seqs": 256, "max_model_len": 40000}


def test_pool_fits_the_budget_and_wastes_less_than_a_block():
    for budget in (10**6, 10**7 + 1, 10**9 + 12345):
        pool = plan_kv_pool(bytes_per_token=1000, block_size=16, budget=budget, **ENGINE)
        assert pool.bytes_per_block == 16000
        assert budget - pool.bytes_per_block < pool.total_bytes <= budget
        assert pool.capacity == pool.num_blocks * 16


def test_pool_holds_the_longest_sequences_of_all_rows_and_stays_in_proportion_to_them():
    """A block is never shared by two sequences, so three of 17 tokens need two blocks of 16 each, not 51 / 16."""
    options = {"bytes_per_token": 1000, "block_size": 16, "budget": 10**12}
    assert 6 <= plan_kv_pool(**options, max_num_seqs=3, max_model_len=17).num_blocks <= 4 * 6
    assert 1000 <= plan_kv_pool(**options, max_num_seqs=10, max_model_len=1600).num_blocks <= 4 * 1000


def test_given_number_of_blocks_is_taken_as_it_is():
    pool = plan_kv_pool(bytes_per_token=1000, block_size=16, budget=0, **ENGINE, num_blocks=7)
    assert (pool.num_blocks, pool.capacity, pool.total_bytes) == (7, 112, 112000)


@pytest.mark.parametrize("budget", [-5 * GIB, 0, 2**20, 4 * 2**20 - 1])
def test_budget_below_two_blocks_is_refused_with_the_numbers(budget):
    with pytest.raises(MemoryBudgetError) as caught:
        plan_kv_pool(bytes_per_token=2**17, block_size=16, budget=budget, **ENGINE)
    message = str(caught.value)
    assert f"{budget / 2**20:.1f} MiB" in message
    assert "16 tokens" in message
    assert "2.0 MiB" in message  # a block
    assert "--num-blocks" in message


def test_budget_of_two_blocks_is_enough():
    assert plan_kv_pool(bytes_per_token=2**17, block_size=16, budget=4 * 2**20, **ENGINE).num_blocks == 2


def test_a_kv_memory_that_is_too_small_is_named() -> None:
    """The message told to free memory."""
    with pytest.raises(MemoryBudgetError, match=r"--kv-memory is 1\.0 MiB, and two blocks .* need 4\.0 MiB"):
        plan_kv_pool(bytes_per_token=2**17, block_size=16, budget=2**20, **ENGINE, is_budget_given=True)


def test_keys_and_values_of_a_token_are_counted_over_all_layers():
    assert CONFIG.kv_bytes_per_token(2) == 2 * 16 * 4 * 64 * 2


def test_model_that_fits_is_not_refused_and_one_without_room_to_run_is():
    held = CONFIG.weight_bytes("float32") + GIB
    require_memory(CONFIG, "float32", GIB, held + GIB, "the CPU")
    with pytest.raises(MemoryBudgetError):
        require_memory(CONFIG, "float32", GIB, held, "the CPU")  # nothing left for a step


def test_refusal_of_a_model_names_every_number():
    with pytest.raises(MemoryBudgetError) as caught:
        require_memory(CONFIG, "float32", 3 * GIB, 5 * GIB // 4, "the CPU")
    message = str(caught.value)
    for count in (CONFIG.weight_bytes("float32"), 3 * GIB, 5 * GIB // 4):
        assert f"{count / GIB:.2f} GiB" in message
    # What the total claims is the sum of its parts, up to rounding.
    weights, pool, rest, total, available = map(float, re.findall(r"([0-9.]+) GiB", message))
    assert total == pytest.approx(weights + pool + rest, abs=0.02)
    assert total > available
    assert "float32" in message
    assert "the CPU" in message


def test_narrow_weights_take_half():
    assert CONFIG.weight_bytes("bfloat16") * 2 == CONFIG.weight_bytes("float32")

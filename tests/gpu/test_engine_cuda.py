"""The engine on a CUDA device against transformers and against its plain twin (torch attention, eager, no graphs).

Skipped without a GPU; results of runs on one are in benchmarks/results.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PLAIN = {"attention": "torch", "kernels": "eager", "enforce_eager": True}
SMALL = {"num_blocks": 600, "max_model_len": 1024}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(folder, transformers' model): a small Qwen3 in bfloat16, large enough that its logits are spread."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=5003, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=128, max_position_embeddings=2048, initializer_range=0.08,
        tie_word_embeddings=False, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    folder = tmp_path_factory.mktemp("model")
    hf.to(torch.bfloat16).save_pretrained(folder)
    return str(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().cuda()


def make_prompts(lengths, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(5003) for _ in range(n)] for n in lengths]


def generate(folder, prompts, params, **options):
    from nanoinfer import LLM

    with LLM(folder, **({"device": "cuda"} | SMALL | options)) as llm:
        outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
        assert llm.check_integrity() == []
    return outputs


def greedy(count, **options):
    from nanoinfer import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **options)


def test_float32_greedy_tokens_equal_transformers(model):
    folder, hf = model
    prompts = make_prompts([70, 1, 17, 200, 33])
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        out = hf.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False)
        expected.append(out[0, len(prompt) :].tolist())
    for options in (PLAIN, {}, {"max_prefill_chunk": 17}, {"schedule": "prefill-first"}):
        outputs = generate(folder, prompts, greedy(32), dtype="float32", **options)
        assert [output.token_ids for output in outputs] == expected, options


def test_bfloat16_is_no_further_from_float32_than_transformers(model):
    folder, hf = model
    prompts = make_prompts([64, 128, 40, 200], seed=1)
    ours = generate(folder, prompts, greedy(1, logprobs=0))
    with torch.inference_mode():
        wide = [hf(torch.tensor([p], device="cuda")).logits[0, -1].log_softmax(-1) for p in prompts]
        narrow_model = hf.to(torch.bfloat16)
        narrow = [narrow_model(torch.tensor([p], device="cuda")).logits[0, -1].float().log_softmax(-1) for p in prompts]
        hf.to(torch.float32)
    for sample, exact, rounded in zip(ours, wide, narrow, strict=True):
        token, value = sample.token_ids[0], sample.logprobs[0].logprob
        assert abs(value - exact[token].item()) <= 2 * (rounded - exact).abs().max().item() + 1e-3


@pytest.mark.parametrize("max_num_seqs", [1, 3, 9, 12, 17, 20, 33, 513])
def test_every_batch_size_under_graphs_equals_eager(model, max_num_seqs):
    """The first row alone was wrong under graphs in one engine; padding rows wrote to real slots in another.

    Sequence i ends after i + 1 tokens, so that steps of every size down to 1 occur.
    """
    folder, _ = model
    prompts = make_prompts([5 + 3 * (i % 20) for i in range(max_num_seqs)], seed=max_num_seqs)
    params = [greedy(i + 1) for i in range(max_num_seqs)]
    options = {"dtype": "float32", "max_num_seqs": max_num_seqs, "num_blocks": 6000}
    eager, graphs = (
        [o.token_ids for o in generate(folder, prompts, params, enforce_eager=choice, **options)]
        for choice in (True, False)
    )
    # Of 131,841 tokens at 513 a few are nearly as likely as another, and sums differ in their last bit.
    differing = sum(a != b for a, b in zip(eager, graphs, strict=True))
    assert differing <= max_num_seqs // 100, differing


def test_layers_at_once_change_no_token_for_any_batch_size(model, monkeypatch):
    """Layers as small as these are computed product by product; here all go through the persistent kernel."""
    from nanoinfer.kernels import persistent_layer

    if not persistent_layer.is_hopper(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU")
    folder, _ = model
    launched = []
    kernel = persistent_layer.persistent_layer
    monkeypatch.setattr(persistent_layer, "MIN_WEIGHTS", 0)
    monkeypatch.setattr(
        persistent_layer, "persistent_layer", lambda x, *rest: launched.append(len(x)) or kernel(x, *rest)
    )
    prompts = make_prompts([5 + 3 * (i % 20) for i in range(70)])
    params = [greedy(i + 1) for i in range(70)]
    options = {"max_num_seqs": 70, "num_blocks": 2000}
    plain = generate(folder, prompts, params, **PLAIN, **options)
    eager = generate(folder, prompts, params, enforce_eager=True, **options)
    assert set(range(2, 65)) <= set(launched)
    graphs = generate(folder, prompts, params, **options)
    # In bfloat16 a few tokens are nearly as likely as another, and attention's splits follow from the graph's size.
    assert sum(a.token_ids != b.token_ids for a, b in zip(graphs, eager, strict=True)) <= 7
    agreeing = sum(
        next((i for i, (a, b) in enumerate(zip(x.token_ids, y.token_ids, strict=True)) if a != b), len(x.token_ids))
        for x, y in zip(graphs, plain, strict=True)
    )
    assert agreeing > 0.5 * sum(range(1, 71)), agreeing  # random weights: a nearly equal token parts two answers


def test_pressure_on_a_tiny_pool_changes_nothing(model):
    folder, _ = model
    prompts = make_prompts([40 + i for i in range(24)], seed=4)
    roomy = generate(folder, prompts, greedy(60), dtype="float32")
    tight = generate(folder, prompts, greedy(60), dtype="float32", block_size=16, num_blocks=40)
    assert [o.token_ids for o in tight] == [o.token_ids for o in roomy]
    assert sum(o.preemptions for o in tight) > 0


def test_sampling_rules_give_the_same_tokens_with_and_without_graphs(model):
    from nanoinfer import SamplingParams

    folder, _ = model
    prompts = make_prompts([30] * 5, seed=5)
    params = [
        SamplingParams(temperature=0.8, seed=1, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=2, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.0, repetition_penalty=1.2, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.8, min_p=0.05, seed=3, logprobs=2, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    ]
    runs = [
        [o.token_ids for o in generate(folder, prompts, params, dtype="float32", **options)]
        for options in ({"enforce_eager": True}, {})
    ]
    assert runs[0] == runs[1]


def test_the_pool_leaves_room_for_the_worst_step_beside_another_process(model):
    """Sizes the pool for real, fills it, and runs prefills of the full budget while it is full."""
    from nanoinfer import LLM

    folder, _ = model
    other = torch.empty(8 << 30, dtype=torch.uint8, device="cuda")
    with LLM(folder, device="cuda", gpu_memory_utilization=0.3, max_model_len=2048) as llm:
        assert llm.info.kv_bytes > 1 << 30
        prompts = make_prompts([1500] * 64, seed=6)
        outputs = llm.generate(prompts, greedy(8))
        assert all(len(output.outputs[0].token_ids) == 8 for output in outputs)
    del other


def test_eager_kernels_under_triton_attention_run_without_a_capture(model):
    """Their boolean indexing waits for the device, which a capture does not survive."""
    folder, _ = model
    prompts = make_prompts([30, 7], seed=8)
    eager = generate(folder, prompts, greedy(12), dtype="float32", kernels="eager")
    plain = generate(folder, prompts, greedy(12), dtype="float32", **PLAIN)
    assert [o.token_ids for o in eager] == [o.token_ids for o in plain]


def test_close_gives_the_memory_back(model):
    from nanoinfer import LLM, SamplingParams

    folder, _ = model
    prompts = make_prompts([30, 7], seed=9)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    llm = LLM(folder, device="cuda", **SMALL)
    llm.generate(prompts, SamplingParams(temperature=0.8, top_k=5, max_tokens=8))
    assert torch.cuda.memory_allocated() - before >= llm.info.kv_bytes
    llm.close()
    # What libraries keep per stream, such as the workspace of cuBLAS, stays.
    assert torch.cuda.memory_allocated() - before < llm.info.kv_bytes // 2


@pytest.mark.parametrize(("left", "fits"), [(3 << 30, True), (1 << 28, False)])
def test_a_nearly_full_gpu_gives_a_small_pool_or_a_clear_refusal(model, left, fits):
    """Not beside other tests, which would find no memory."""
    from nanoinfer import LLM
    from nanoinfer.errors import MemoryBudgetError

    folder, _ = model
    torch.cuda.empty_cache()
    other = torch.empty(torch.cuda.mem_get_info()[0] - left, dtype=torch.uint8, device="cuda")
    try:
        refused = nullcontext() if fits else pytest.raises(MemoryBudgetError)
        with refused, LLM(folder, device="cuda", max_model_len=512, gpu_memory_utilization=0.99) as llm:
            outputs = llm.generate(make_prompts([300] * 40, seed=12), greedy(8))
            assert all(len(output.outputs[0].token_ids) == 8 for output in outputs)
    finally:
        del other
        torch.cuda.empty_cache()


def test_a_given_pool_that_does_not_fit_is_refused_before_the_load(model):
    from nanoinfer import LLM
    from nanoinfer.errors import MemoryBudgetError

    with pytest.raises(MemoryBudgetError, match="available"):
        LLM(model[0], device="cuda", num_blocks=1 << 28)


@pytest.mark.parametrize("filters", [{"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 40, "top_p": 0.9}])
def test_filters_on_the_gpu_draw_what_the_plain_twin_draws(model, filters):
    from nanoinfer import SamplingParams

    folder, _ = model
    prompts = make_prompts([20] * 4, seed=10)
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=20, ignore_eos=True, **filters) for i in range(4)]
    fused = generate(folder, prompts, params, dtype="float32")
    plain = generate(folder, prompts, params, dtype="float32", **PLAIN)
    assert [o.token_ids for o in fused] == [o.token_ids for o in plain]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_engines_on_two_devices_in_turn_and_from_another_thread(model):
    """Kernels were launched on the current device, which was the one of the engine made last."""
    from nanoinfer import LLM

    folder, _ = model
    prompts = make_prompts([30, 7], seed=11)
    options = {"dtype": "float32", **SMALL}
    try:
        with LLM(folder, device="cuda:0", **options) as first, LLM(folder, device="cuda:1", **options) as second:
            expected = [o.outputs[0].token_ids for o in first.generate(prompts, greedy(12))]
            assert [o.outputs[0].token_ids for o in second.generate(prompts, greedy(12))] == expected
            with ThreadPoolExecutor(1) as thread:
                outputs = thread.submit(second.generate, make_prompts([30, 7], seed=11), greedy(12)).result()
            assert [o.outputs[0].token_ids for o in outputs] == expected
    finally:
        torch.cuda.set_device(0)

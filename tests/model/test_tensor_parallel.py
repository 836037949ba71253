"""Tensor parallelism gives what one rank gives: for every family, for every way to cut it, under every schedule."""

from __future__ import annotations

import pytest
import torch
from test_parity import FAMILIES, greedy, randomise, shape
from thread_ranks import use_thread_ranks
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from nanoinfer import LLM, ConfigError, SamplingParams
from nanoinfer.runner import build
from nanoinfer.runner.overlapped_runner import OverlappedRunner

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)

# What the families' shapes leave out: KV heads that are repeated in part, features and tokens that do not divide.
MORE = {
    "qwen3-40-over-10": Qwen3Config(**shape(num_attention_heads=40, num_key_value_heads=10, head_dim=8)),
    "llama-odd-features": LlamaConfig(**shape(intermediate_size=177, vocab_size=1003, num_attention_heads=8)),
}
CUTS = [
    ("qwen3-gqa2", 2), ("qwen3-gqa2", 4), ("qwen3-tied-yarn", 3), ("qwen3-tied-yarn", 6), ("qwen3-attention-bias", 2),
    ("qwen3-attention-bias", 3), ("qwen2-gqa7-bias", 7), ("qwen2-tied", 2), ("llama-gqa1", 3), ("llama-llama3-rope", 2),
    ("llama-linear-rope", 6), ("llama-all-biases", 2), ("llama-all-biases", 3), ("smollm2-gqa3-tied", 3),
    ("smollm2-gqa3-tied", 9), ("mistral-gqa2", 4), ("qwen3-40-over-10", 4), ("llama-odd-features", 8),
]  # fmt: skip


def make_case(name, folder):
    """(folder, 7 prompts, some with a common prefix, transformers' greedy tokens)."""
    torch.manual_seed(5)
    config = (FAMILIES | MORE)[name]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    randomise(model)
    model.save_pretrained(folder)
    common = torch.randint(0, config.vocab_size, (48,)).tolist()
    own = [torch.randint(0, config.vocab_size, (n,)).tolist() for n in (70, 1, 15, 16, 17, 33, 5)]
    prompts = [common[: 16 * (i % 4)] + tail for i, tail in enumerate(own)]
    return str(folder), prompts, [greedy(model, prompt)[: GREEDY.max_tokens] for prompt in prompts]


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    made = {}

    def case(name):
        if name not in made:
            made[name] = make_case(name, tmp_path_factory.mktemp("model"))
        return made[name]

    return case


@pytest.mark.parametrize(("name", "tp"), CUTS, ids=[f"{name}-{tp}" for name, tp in CUTS])
def test_greedy_ids_equal_transformers(cases, monkeypatch, name, tp):
    folder, prompts, expected = cases(name)
    use_thread_ranks(monkeypatch)
    with LLM(folder, device="cpu", kernels="cpu", num_blocks=128, tensor_parallel_size=tp) as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)] == expected
        assert llm.info.tensor_parallel_size == tp


SCHEDULES = {
    "no cache, prefill-first": {"enable_prefix_caching": False, "schedule": "prefill-first"},
    "chunk 1": {"max_prefill_chunk": 1},
    "chunk block+1": {"max_prefill_chunk": 17},
    "two at a time": {"max_num_seqs": 2},
    "preemption": {"num_blocks": 10},
    "preemption in chunks": {"num_blocks": 10, "max_prefill_chunk": 5, "schedule": "prefill-first"},
}


@pytest.mark.parametrize("overlapped", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("options", SCHEDULES.values(), ids=list(SCHEDULES))
def test_schedules_do_not_matter(cases, monkeypatch, options, overlapped):
    """Workers had a stale state of sequences that came back after a preemption."""
    folder, prompts, expected = cases("qwen3-gqa2")
    use_thread_ranks(monkeypatch)
    if overlapped:
        monkeypatch.setattr(build, "make_runner", overlapped_runner)
    with LLM(folder, device="cpu", kernels="cpu", tensor_parallel_size=2, **({"num_blocks": 128} | options)) as llm:
        outputs = llm.generate(prompts, GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        preempted = sum(output.outputs[0].preemptions for output in outputs)
        assert (preempted > 0) == (options.get("num_blocks") == 10)
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, n=3)
        siblings = llm.generate(prompts[:1], params)[0].outputs
        assert [sample.token_ids for sample in siblings] == [expected[0]] * 3
        ended = llm.stream(prompts[1], GREEDY)
        next(ended)
        ended.close()
        assert llm.generate(prompts[1], GREEDY)[0].outputs[0].token_ids == expected[1]
        assert llm.check_integrity() == []


def overlapped_runner(model, attention, kv_caches, *, config, max_model_len, device):
    return OverlappedRunner(
        model, attention, kv_caches, max_num_seqs=config.max_num_seqs, max_model_len=max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens, device=device, use_graphs=False,
    )  # fmt: skip


SAMPLING = [
    SamplingParams(temperature=0.9, seed=1, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.01, seed=2, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.2, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=4, logprobs=3, max_tokens=16, presence_penalty=0.5, ignore_eos=True),
    SamplingParams(temperature=0.0, min_tokens=10, max_tokens=16, stop_token_ids=list(range(300))),
    SamplingParams(temperature=1.0, seed=6, n=3, max_tokens=16, ignore_eos=True),
]


@pytest.mark.parametrize(("tp", "overlapped"), [(2, False), (2, True), (4, False)])
def test_every_sampling_rule_gives_what_one_rank_gives(cases, monkeypatch, tp, overlapped):
    """Alone, in batches of two and three, and all together: gathered logits were in the wrong order for batches."""
    folder, prompts, _ = cases("qwen3-gqa2")
    results = []
    for size in (1, tp):
        if size > 1:
            use_thread_ranks(monkeypatch)
            if overlapped:
                monkeypatch.setattr(build, "make_runner", overlapped_runner)
        with LLM(folder, device="cpu", kernels="cpu", num_blocks=128, tensor_parallel_size=size) as llm:
            outputs = []
            for first, last in ((0, 1), (1, 3), (3, 6), (0, 6)):
                outputs += llm.generate(prompts[first:last], SAMPLING[first:last])
        results.append([[sample.token_ids for sample in output.outputs] for output in outputs])
        logprobs = [step for output in outputs for step in output.outputs[0].logprobs or []]
        results.append([step.token_id for step in logprobs])
        results.append(torch.tensor([[value for _, value in step.top] for step in logprobs]))
    assert results[0] == results[3]
    assert results[1] == results[4]
    assert torch.allclose(results[2], results[5], atol=1e-4)


def test_plain_steps_exchange_only_what_they_must(cases, monkeypatch):
    """Two sums per layer, one for the embedding, and one exchange of the best tokens; logits stay where they are."""
    folder, prompts, _ = cases("qwen3-gqa2")
    use_thread_ranks(monkeypatch)
    with LLM(folder, device="cpu", kernels="cpu", num_blocks=128, tensor_parallel_size=2) as llm:
        group = llm._executor.groups[0]
        for params, exchanges in ((SAMPLING[0], 2 * 2 + 2), (SAMPLING[1], 2 * 2 + 3)):
            before, steps = group.num_exchanges, llm.events.subscribe()
            llm.generate(prompts[:1], params)
            assert group.num_exchanges - before == exchanges * sum(
                event.prefill_tokens + event.decode_tokens > 0 for event in steps.drain()
            )


def test_the_pool_is_what_the_poorest_rank_can_have(cases, monkeypatch):
    """Each rank sized a pool of its own, and the scheduler used rank 0's."""
    folder, prompts, expected = cases("qwen3-gqa2")
    use_thread_ranks(monkeypatch)
    budgets = iter([64 << 20, 3 << 20, 100 << 20, 50 << 20])
    monkeypatch.setattr(build.memory, "cpu_kv_budget", lambda usable: next(budgets))
    with LLM(folder, device="cpu", kernels="cpu", tensor_parallel_size=4) as llm:
        assert llm.info.kv_bytes <= (3 << 20) // 4 < llm.info.kv_bytes + llm.info.kv_bytes // llm.info.num_blocks
        assert llm.generate(prompts[1], GREEDY)[0].outputs[0].token_ids == expected[1]


def test_sizes_that_do_not_divide_the_heads_are_refused_with_those_that_do(cases):
    folder, _, _ = cases("smollm2-gqa3-tied")
    with pytest.raises(ConfigError, match=r"^9 attention heads cannot be split over 2 ranks; .* --tp 1, 3 and 9\.$"):
        LLM(folder, device="cpu", kernels="cpu", tensor_parallel_size=2)


def test_random_weights_are_those_of_one_rank(monkeypatch):
    outputs = []
    for tp in (1, 2):
        if tp > 1:
            use_thread_ranks(monkeypatch)
        with LLM(load_format="dummy", device="cpu", kernels="cpu", num_blocks=16, tensor_parallel_size=tp) as llm:
            outputs.append(llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids)
    assert outputs[0] == outputs[1]

"""The overlapped runner against transformers and against its plain twin, on a CPU, where the same code runs."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from test_parity import FAMILIES, greedy, randomise
from transformers import AutoModelForCausalLM

from nanoinfer import LLM, SamplingParams
from nanoinfer.kernels import reference
from nanoinfer.kernels.kernel_set import EAGER
from nanoinfer.runner import build, graphed_steps, overlapped_runner
from nanoinfer.runner.cuda_graphs import GraphCache, bucket_sizes
from nanoinfer.runner.graphed_steps import Bucket
from nanoinfer.runner.overlapped_runner import OverlappedRunner
from nanoinfer.runner.sampler import Sampler


@pytest.fixture
def overlapped(monkeypatch):
    def make(model, attention, kv_caches, *, config, max_model_len, device):
        return OverlappedRunner(
            model, attention, kv_caches, max_num_seqs=config.max_num_seqs, max_model_len=max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens, device=device, use_graphs=False,
        )  # fmt: skip

    monkeypatch.setattr(build, "make_runner", make)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    torch.manual_seed(3)
    config = FAMILIES["qwen3-gqa2"]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    randomise(model)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    prompts = [torch.randint(0, config.vocab_size, (n,)).tolist() for n in (40, 1, 17, 16, 33)]
    return str(folder), prompts, [greedy(model, prompt) for prompt in prompts]


@pytest.mark.parametrize(
    "options",
    [{}, {"num_blocks": 14}, {"schedule": "prefill-first", "max_prefill_chunk": 5}, {"max_num_seqs": 2}],
    ids=["default", "preemption", "prefill-first", "two at a time"],
)
def test_greedy_ids_equal_transformers_with_overlap(case, overlapped, options):
    folder, prompts, expected = case
    with LLM(folder, device="cpu", **({"num_blocks": 200} | options)) as llm:
        assert llm._engine._max_in_flight == 1
        params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, params)] == expected
        assert llm.check_integrity() == []


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5])
def test_resumed_sequence_decodes_its_own_last_token_not_the_row_s_former(case, overlapped, chunk):
    """A chunk may end one short of what is known; the token after it is then a decode, fed from the device's row."""
    folder, prompts, expected = case
    with LLM(folder, device="cpu", num_blocks=14, max_prefill_chunk=chunk) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
        outputs = llm.generate(prompts, params)
    assert sum(output.outputs[0].preemptions for output in outputs) > 0
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_every_sampling_rule_gives_what_the_plain_runner_gives(case, monkeypatch):
    """Penalties need token ids that the host learns late; logits of a graph must not be changed under its feet."""
    folder, prompts, _ = case
    params = [
        SamplingParams(temperature=0.9, seed=1, max_tokens=30),
        SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, seed=2, max_tokens=30),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.2, max_tokens=30),
        SamplingParams(temperature=0.8, seed=4, logprobs=3, max_tokens=30, presence_penalty=0.5),
        SamplingParams(temperature=0.0, min_tokens=20, max_tokens=30, stop_token_ids=list(range(300))),
    ]
    results = []
    for runner in ("plain", "overlapped"):
        if runner == "overlapped":
            monkeypatch.setattr(
                build,
                "make_runner",
                lambda model, attention, kv_caches, *, config, max_model_len, device: OverlappedRunner(
                    model, attention, kv_caches, max_num_seqs=config.max_num_seqs, max_model_len=max_model_len,
                    max_num_batched_tokens=config.max_num_batched_tokens, device=device, use_graphs=False,
                ),
            )  # fmt: skip
        with LLM(folder, device="cpu", num_blocks=12) as llm:
            results.append([o.outputs[0] for o in llm.generate(prompts, params)])
    for plain, overlapped_output in zip(*results, strict=True):
        assert plain.token_ids == overlapped_output.token_ids
        for one, other in zip(plain.logprobs or [], overlapped_output.logprobs or [], strict=True):
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_min_tokens_row_is_plain_again_once_it_has_them(case, overlapped, monkeypatch):
    folder, prompts, _ = case
    sizes = []
    sample = Sampler.sample
    monkeypatch.setattr(Sampler, "sample", lambda *args: sizes.append(len(args[2])) or sample(*args))
    params = SamplingParams(temperature=0.0, min_tokens=5, max_tokens=30, stop_token_ids=[330])
    with LLM(folder, device="cpu", num_blocks=40) as llm:
        outputs = llm.generate(prompts[:1], params)[0].outputs[0]
    assert len(outputs.token_ids) > 10
    assert 5 <= len(sizes) <= 6


def test_close_frees_the_runner_without_the_garbage_collector(case, monkeypatch):
    """A cycle through a bound method once kept weights and pool until the collector came by."""
    folder, prompts, _ = case
    runners = []

    def make(model, attention, kv_caches, *, config, max_model_len, device):
        runner = OverlappedRunner(
            model, attention, kv_caches, max_num_seqs=config.max_num_seqs, max_model_len=max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens, device=device, use_graphs=False,
        )  # fmt: skip
        runners.append(weakref.ref(runner))
        return runner

    monkeypatch.setattr(build, "make_runner", make)
    llm = LLM(folder, device="cpu", num_blocks=40)
    llm.generate(prompts[:1], SamplingParams(max_tokens=3))
    gc.collect()
    gc.disable()
    try:
        llm.close()
        assert runners[0]() is None
    finally:
        gc.enable()


class ReplayedEagerly(GraphCache):
    """Runs a captured step anew at each replay: what a graph does, minus the graph."""

    def capture(self, key, step):
        step()
        self._graphs[key] = step

    def replay(self, key):
        return self._graphs[key]()


class DeviceOnlyAttention:
    """The reference kernel behind the protocol; reads only tensors, as a back end inside a graph must."""

    name, reads_device_only = "reference", True

    def __init__(self, heads, cos_sin, kernels):
        self.heads, self.cos_sin, self.kernels = heads, cos_sin, kernels

    def plan(self, batch):
        self.batch = batch
        return self

    def run(self, qkv, qk_norm, cache, sample_at=None):
        batch, heads = self.batch, self.heads
        q, _, _ = self.kernels.qk_norm_rope_store(qkv, heads, qk_norm, self.cos_sin, batch.token_slots(), cache)
        out = reference.paged_attention(
            q, *cache, batch.block_tables, batch.cu_seqlens_q, batch.context_lens, heads.scale
        )
        return out.flatten(1) if sample_at is None else out.flatten(1)[sample_at]


@pytest.fixture
def graphed(monkeypatch):
    """Engines whose steps are graphs, replayed eagerly on a CPU; their runners."""
    runners = []

    def make(model, attention, kv_caches, *, config, max_model_len, device):
        attention = DeviceOnlyAttention(attention.heads, attention.cos_sin, EAGER)
        runner = OverlappedRunner(
            model, attention, kv_caches, max_num_seqs=config.max_num_seqs, max_model_len=max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens, device=device, use_graphs=True,
        )  # fmt: skip
        runners.append(runner)
        return runner

    monkeypatch.setattr(build, "make_runner", make)
    monkeypatch.setattr(overlapped_runner, "GraphCache", ReplayedEagerly)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
    return runners


def test_nothing_is_sent_while_the_same_sequences_decode(case, graphed, monkeypatch):
    folder, prompts, expected = case
    sent = []
    copy_in = graphed_steps._copy_in
    monkeypatch.setattr(
        graphed_steps, "_copy_in", lambda values, inputs: sent.append(len(values)) or copy_in(values, inputs)
    )
    with LLM(folder, device="cpu", num_blocks=60, max_num_seqs=2) as llm:
        params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (20, 64)]
        outputs = llm.generate(prompts[:2], params)
    assert [o.outputs[0].token_ids for o in outputs] == [expected[0][:20], expected[1]]
    # For two sequences and for one: once for the capture, once for their first step.
    assert sorted(sent) == [2, 2, 4, 4]


@pytest.mark.parametrize(
    ("max_num_seqs", "options"),
    [(1, {}), (3, {}), (9, {"max_prefill_chunk": 7}), (33, {"num_blocks": 14, "max_prefill_chunk": 5})],
    ids=["1", "3", "9 in chunks", "33 with preemption"],
)
def test_graphed_steps_with_padding_equal_transformers(case, graphed, max_num_seqs, options):
    """Padding rows of a bucket once wrote to real slots, and once read stale ones."""
    folder, prompts, expected = case
    with LLM(folder, device="cpu", **({"num_blocks": 30, "max_num_seqs": max_num_seqs} | options)) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, params)] == expected
        # The same with logits graphs and a sampler outside: logprobs need it.
        with_logprobs = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=0)
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, with_logprobs)] == expected
    kinds = {type(key) for key in graphed[0]._decode._graphs._graphs}
    assert kinds == {tuple, Bucket}


@pytest.mark.parametrize("max_num_seqs", [1, 3, 9, 12, 17, 20, 33, 256, 513])
def test_every_batch_fits_a_bucket_and_no_bucket_exceeds_the_limit(max_num_seqs):
    sizes = bucket_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_num_seqs
    assert sizes[0] == 1

"""Tensor parallelism on two GPUs: what one rank gives two ranks give, and whatever happens to one, nothing is left.

Skipped with fewer GPUs; results of runs on two are in benchmarks/results.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from nanoinfer import LLM, ConfigError, EngineError, SamplingParams
from nanoinfer.runner import ranks

COUNT = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.skipif(COUNT < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(180),  # the first ones compile kernels for float32
]

FAULTY_WORKER = Path(__file__).parents[1] / "faults" / "faulty_worker.py"
OPTIONS = {"device": "cuda", "dtype": "float32", "num_blocks": 400, "max_model_len": 1024, "max_num_seqs": 32}
TIGHT = {"block_size": 16, "num_blocks": 40, "max_prefill_chunk": 64}
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 5003, "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {"qwen3": {}, "tied": {"tie_word_embeddings": True}, "one-kv-head": {"num_key_value_heads": 1}}
MIB = 1 << 20


def write_model(folder, **changes):
    from safetensors.torch import save_file

    shape = SHAPE | changes
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape))
    hidden, inner, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = head * shape["num_attention_heads"], head * shape["num_key_value_heads"]
    generator = torch.Generator().manual_seed(0)

    def normal(*size):
        return (torch.randn(size, generator=generator) * 0.08).to(torch.bfloat16)

    def norm(size):
        return (1 + torch.randn(size, generator=generator) * 0.1).to(torch.bfloat16)

    tensors = {"model.embed_tokens.weight": normal(shape["vocab_size"], hidden), "model.norm.weight": norm(hidden)}
    if not shape["tie_word_embeddings"]:
        tensors["lm_head.weight"] = normal(shape["vocab_size"], hidden)
    for layer in range(shape["num_hidden_layers"]):
        parts = {
            "input_layernorm": norm(hidden), "post_attention_layernorm": norm(hidden),
            "self_attn.q_proj": normal(queries, hidden), "self_attn.k_proj": normal(keys, hidden),
            "self_attn.v_proj": normal(keys, hidden), "self_attn.o_proj": normal(hidden, queries),
            "self_attn.q_norm": norm(head), "self_attn.k_norm": norm(head),
            "mlp.gate_proj": normal(inner, hidden), "mlp.up_proj": normal(inner, hidden),
            "mlp.down_proj": normal(hidden, inner),
        }  # fmt: skip
        tensors |= {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def make_prompts(lengths, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(5003) for _ in range(n)] for n in lengths]


def greedy(count, **options):
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **options)


PROMPTS = make_prompts([70, 1, 17, 200, 33, 130, 129])
MANY = make_prompts([40 + i for i in range(24)], seed=4)
RULES = [
    SamplingParams(temperature=0.8, seed=1, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=2, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, presence_penalty=0.3, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.8, min_p=0.05, seed=3, logprobs=2, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.0, frequency_penalty=0.5, logprobs=1, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=7, n=3, max_tokens=20, ignore_eos=True),
    greedy(20),
]
LONG = greedy(800)


def tokens(outputs):
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def logprobs(outputs):
    return [p.logprob for output in outputs for sample in output.outputs for p in sample.logprobs or []]


class References:
    """The models' folders, and what one rank answers."""

    def __init__(self, folder):
        self._folder = folder
        self._made = {}

    def __call__(self, name):
        """(model folder, outputs of PROMPTS, of PROMPTS under RULES, of MANY)."""
        if name not in self._made:
            path = write_model(self._folder / name, **MODELS[name])
            with LLM(path, **OPTIONS) as llm:
                self._made[name] = (
                    path,
                    llm.generate(PROMPTS, greedy(32)),
                    llm.generate(PROMPTS, RULES),
                    llm.generate(MANY, greedy(60)),
                )
        return self._made[name]


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    return References(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def free_at_first(references):
    """Free bytes of both devices, with what libraries keep in this process once it has had an engine of two ranks."""
    with LLM(references("qwen3")[0], tensor_parallel_size=2, **OPTIONS) as llm:
        llm.generate(PROMPTS, RULES)
    return free()


def free():
    torch.cuda.empty_cache()
    return [torch.cuda.mem_get_info(device)[0] for device in (0, 1)]


def until(condition, message, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, message
        time.sleep(0.02)
    return value


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def worker_pid(llm):
    return llm._executor._ranks._workers[0].process.pid


def assert_given_back(at_first):
    def taken():
        return [before - now for before, now in zip(at_first, free(), strict=True)]

    # cuBLAS keeps 32 MiB for every thread that has compiled, and the driver some for graphs and kernels to come. What
    # engines leave, 200 MiB each, would add up.
    until(lambda: taken()[0] < 768 * MIB and taken()[1] < 64 * MIB, f"bytes not given back: {taken()}")


@contextmanager
def two_ranks(folder, at_first, **options):
    """An engine with two ranks; afterwards its other process and the memory of both devices are gone."""
    with LLM(folder, tensor_parallel_size=2, **(OPTIONS | options)) as llm:
        pid = worker_pid(llm)
        yield llm
        began = time.monotonic()
    assert time.monotonic() - began < 8, "close waited for something"
    until(lambda: not is_running(pid), f"rank 1 ({pid}) still runs")
    assert_given_back(at_first)


# -- the same answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(MODELS))
def test_two_ranks_answer_as_one_does(references, free_at_first, name):
    """Greedy in graphs, twice (the second time from the prefix cache), and every rule of sampling."""
    folder, plain, by_rules, many = references(name)
    with two_ranks(folder, free_at_first) as llm:
        assert tokens(llm.generate(PROMPTS, greedy(32))) == tokens(plain)
        assert tokens(llm.generate(PROMPTS, greedy(32))) == tokens(plain)
        outputs = llm.generate(PROMPTS, RULES)
        assert tokens(outputs) == tokens(by_rules)
        assert logprobs(outputs) == pytest.approx(logprobs(by_rules), abs=1e-3)
        assert tokens(llm.generate(MANY, greedy(60))) == tokens(many)
        assert llm.check_integrity() == []


def test_two_engines_at_once_eager_and_in_chunks_under_pressure(references, free_at_first):
    """Steps of the two take turns. The second one has a pool so small that sequences are preempted."""
    folder, plain, by_rules, many = references("qwen3")
    with (
        two_ranks(folder, free_at_first, enforce_eager=True) as eager,
        LLM(folder, tensor_parallel_size=2, **(OPTIONS | TIGHT)) as tight,
    ):
        outputs = {}
        ids = [(eager, eager.submit(prompt, greedy(32)), output) for prompt, output in zip(PROMPTS, plain, strict=True)]
        ids += [(tight, tight.submit(prompt, greedy(60)), output) for prompt, output in zip(MANY, many, strict=True)]
        while eager.has_unfinished or tight.has_unfinished:
            for llm in (eager, tight):
                for delta in llm.step():
                    if delta.output is not None:
                        outputs[llm, delta.request_id] = delta.output
        assert [tokens([outputs[llm, id_]]) for llm, id_, _ in ids] == [tokens([output]) for _, _, output in ids]
        assert sum(outputs[tight, id_].outputs[0].preemptions for llm, id_, _ in ids if llm is tight) > 0
        assert tokens(eager.generate(PROMPTS, RULES)) == tokens(by_rules)
        assert tokens(tight.generate(PROMPTS, greedy(32))) == tokens(plain)
        assert eager.check_integrity() == tight.check_integrity() == []


def test_a_pool_of_measured_size(references, free_at_first):
    """The worst step is run on both ranks, and bfloat16 is what a user gets."""
    folder = references("qwen3")[0]
    options = {"num_blocks": None, "dtype": "bfloat16", "gpu_memory_utilization": 0.5, "max_num_seqs": 256}
    with two_ranks(folder, free_at_first, **options) as llm:
        assert llm.info.kv_bytes > 256 * MIB
        outputs = llm.generate(make_prompts([900] * 40, seed=6), greedy(8))
        assert all(len(output.outputs[0].token_ids) == 8 for output in outputs)


def test_more_ranks_than_gpus(references, free_at_first):
    size = 4 if COUNT < 4 else 8
    if size <= COUNT:
        pytest.skip("there are as many GPUs as heads")
    began = time.monotonic()
    with pytest.raises(ConfigError, match=f"tensor_parallel_size is {size}, but torch sees {COUNT} CUDA devices; use"):
        LLM(references("qwen3")[0], tensor_parallel_size=size, **OPTIONS)
    assert time.monotonic() - began < 10


# -- faults ----------------------------------------------------------------------------------------------------------


def start_decoding(llm, steps=30):
    """A long decode under way, its graph captured and one step in flight."""
    llm.submit(PROMPTS[0], LONG)
    for _ in range(steps):
        llm.step()


def run_out(llm):
    while llm.has_unfinished:
        llm.step()


def assert_fails(llm, message, seconds):
    began = time.monotonic()
    with pytest.raises(EngineError, match=message):
        run_out(llm)
    assert time.monotonic() - began < seconds
    with pytest.raises(EngineError, match=message):  # not a hang, and not another error
        llm.generate([[1, 2, 3]], greedy(4))
    assert llm.check_integrity() == []


def test_a_rank_is_killed_in_a_decode(references, free_at_first):
    with two_ranks(references("qwen3")[0], free_at_first) as llm:
        start_decoding(llm)
        os.kill(worker_pid(llm), signal.SIGKILL)
        assert_fails(llm, r"rank 1 \(process \d+\) was ended by SIGKILL", 10)


def test_a_rank_is_killed_while_nothing_runs_and_had_nothing_on_the_first_device(references, free_at_first):
    with two_ranks(references("qwen3")[0], free_at_first) as llm:
        llm.generate(PROMPTS, greedy(8))
        pid, before = worker_pid(llm), free()
        os.kill(pid, signal.SIGKILL)
        until(lambda: not is_running(pid), "it still runs")
        until(lambda: free()[1] - before[1] > 256 * MIB, "its memory is still taken")
        assert free()[0] - before[0] < 128 * MIB, "the second rank had a context on the first device"
        with pytest.raises(EngineError, match="SIGKILL"):
            llm.generate([[1, 2, 3]], greedy(4))


def test_a_rank_hangs_in_a_decode(references, free_at_first):
    with two_ranks(references("qwen3")[0], free_at_first, tp_timeout=5) as llm:
        start_decoding(llm)
        os.kill(worker_pid(llm), signal.SIGSTOP)
        assert_fails(llm, r"rank 1 did not answer in time \(--tp-timeout\)", 15)


def test_a_rank_raises(references, free_at_first, tmp_path, monkeypatch):
    monkeypatch.setenv("NANOINFER_TEST_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("NANOINFER_TEST_FAULT", "raise")
    monkeypatch.setenv("NANOINFER_TEST_STEP", "20")
    monkeypatch.setattr(ranks, "WORKER_COMMAND", [sys.executable, str(FAULTY_WORKER)])
    with two_ranks(references("qwen3")[0], free_at_first) as llm:
        llm.submit(PROMPTS[0], LONG)
        assert_fails(llm, "rank 1 failed: ValueError: a bug in rank 1", 10)


def test_ctrl_c_once_and_twice(references, free_at_first):
    """Once, the engine goes on; twice, with a rank that hangs, it ends although the main thread waits for the GPU."""
    folder, plain, _, _ = references("qwen3")

    def interrupt(after):
        timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        return timer

    with two_ranks(folder, free_at_first) as llm:
        llm.generate(PROMPTS[:1], greedy(8))
        timer = interrupt(0.15)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([PROMPTS[0]] * 8, LONG)
        timer.join()
        assert tokens(llm.generate(PROMPTS, greedy(32))) == tokens(plain)

        start_decoding(llm)
        pid = worker_pid(llm)
        os.kill(pid, signal.SIGSTOP)
        timers = [interrupt(0.5), interrupt(1.0)]
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            run_out(llm)
        for timer in timers:
            timer.join()
        assert time.monotonic() - began < 10
        until(lambda: not is_running(pid), "it still runs")
        with pytest.raises(EngineError):
            llm.generate([[1, 2, 3]], greedy(4))


PROGRAM = """
import os, signal, sys, time
from nanoinfer import LLM, EngineError, SamplingParams

def main():
    folder, what = sys.argv[1:]
    llm = LLM(folder, device="cuda", dtype="float32", num_blocks=400, max_model_len=1024, max_num_seqs=32,
              tensor_parallel_size=2, enforce_eager=what == "hang", tp_timeout=5)
    pid = llm._executor._ranks._workers[0].process.pid
    llm.submit([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True))
    for _ in range(10):
        llm.step()
    print(pid, flush=True)
    if what == "hang":
        os.kill(pid, signal.SIGSTOP)
    try:
        while True:
            llm.step()
            if not llm.has_unfinished:
                llm.submit([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True))
    except EngineError as error:
        print(error, flush=True)
    llm.close()
    print("closed", flush=True)

if __name__ == "__main__":
    main()
"""


@contextmanager
def program(folder, what):
    """PROGRAM in a process of its own, which a fault may end; yields it and the process id of its rank 1."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, folder, what], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline()
        assert line.strip().isdecimal(), line + process.communicate(timeout=20)[1]
        yield process, int(line)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.communicate()


def test_a_killed_parent_leaves_no_rank(references, free_at_first):
    with program(references("qwen3")[0], "run") as (process, pid):
        process.kill()
        until(lambda: not is_running(pid), f"rank 1 ({pid}) still runs")
    assert_given_back(free_at_first)


def test_a_rank_hangs_in_a_step_without_a_graph(references, free_at_first):
    """torch's own watchdog sees exchanges outside graphs; when their time is up it ends the whole process."""
    with program(references("qwen3")[0], "hang") as (process, pid):
        out, err = process.communicate(timeout=40)
        assert process.returncode == 0, err[-2000:]
        assert "did not answer in time (--tp-timeout)" in out
        assert out.endswith("closed\n")
        until(lambda: not is_running(pid), f"rank 1 ({pid}) still runs")
    assert_given_back(free_at_first)

"""How LLM takes being used: by several threads, after its end, with things that are no prompts."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from test_parity import shape
from transformers import Qwen3Config

from nanoinfer import LLM, ConfigError, EngineError, RequestError, SamplingParams
from nanoinfer.engine.turns import Turns

HI = {"role": "user", "content": "hi"}  # whose keys were answered, each as a prompt
PROMPTS = [[i, i + 1, i + 2] for i in range(12)]
PATIENCE_S = 100.0  # for what comes at once, on however busy a machine
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


def greedy(count):
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    Qwen3Config(**shape(), architectures=["Qwen3ForCausalLM"]).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def llm(folder):
    with LLM(folder, device="cpu", kernels="cpu", load_format="dummy", num_blocks=200, max_model_len=512) as llm:
        yield llm


def ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def queued(turns, count):
    """Wait until just `count` threads wait for their turn."""
    deadline = time.monotonic() + PATIENCE_S
    while turns.waiting != count:
        assert time.monotonic() < deadline
        time.sleep(0)


def test_threads_use_one_llm_at_the_same_time(llm):
    """They were in the engine at once: some waited for ever, others lost their requests."""
    alone = ids(llm.generate(PROMPTS, greedy(12)))
    subscription = llm.events.subscribe()

    def all_at_once(pool, function):
        with llm._turns:
            futures = [pool.submit(function, prompt) for prompt in PROMPTS]
            queued(llm._turns, len(PROMPTS))
        results = [future.result(PATIENCE_S) for future in futures]
        assert max(event.running for event in subscription.drain()) > 1  # and not one thread after the other
        return results

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = all_at_once(pool, lambda prompt: ids(llm.generate([prompt], greedy(12)))[0])
        streamed = all_at_once(pool, lambda prompt: list(llm.stream(prompt, greedy(5)))[-1].output)
    assert together == alone
    assert ids(streamed) == [tokens[:5] for tokens in alone]
    assert llm.check_integrity() == []


def test_closing_ends_what_other_threads_wait_for(llm):
    """They waited for ever."""
    started = threading.Event()

    def run():
        stream = llm.stream([1, 2, 3], LONG)
        next(stream)
        with llm._turns:
            started.set()
            queued(llm._turns, 2)  # the other run, and the end
        return list(stream)

    with ThreadPoolExecutor(2) as pool:
        with llm._turns:
            runs = [pool.submit(run), pool.submit(llm.generate, [[4, 5]], LONG)]
            queued(llm._turns, 2)
        assert started.wait(PATIENCE_S)
        llm.close()
        for future in runs:
            with pytest.raises(EngineError, match="closed"):
                future.result(PATIENCE_S)


def test_a_stream_that_is_cut_says_so_and_a_finished_one_does_not(llm):
    """A closed LLM let it end like an answer that is complete."""
    cut, finished, left = llm.stream([1, 2], LONG), llm.stream([3, 4], greedy(3)), llm.stream([5, 6], LONG)
    next(cut)
    next(left)
    assert list(finished)[-1].output is not None
    left.close()
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        next(cut)
    assert list(cut) == list(finished) == list(left) == []


def test_a_fork_cannot_use_the_engine_and_does_not_end_it(llm):
    """It was ended by OpenMP, or stopped the ranks of its parent."""
    expected = ids(llm.generate(PROMPTS, greedy(4)))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        for use in (lambda: llm.generate(PROMPTS, greedy(4)), lambda: llm.stream([1]), llm.close, llm.close):
            try:
                said.append(str(use()))
            except BaseException as error:
                said.append(f"{type(error).__name__}: {error}")
        os.write(writing, "\n".join(said).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        first, second, *closing = pipe.read().split("\n")
    os.waitpid(child, 0)
    assert first.startswith(f"EngineError: this LLM belongs to process {os.getpid()}, of which this one is a fork")
    assert (second, closing) == (first, ["None", "None"])
    assert ids(llm.generate(PROMPTS, greedy(4))) == expected


def test_outputs_that_another_call_took_are_not_waited_for(llm):
    with ThreadPoolExecutor(1) as pool:
        with llm._turns:
            run = pool.submit(llm.generate, [[1, 2]], greedy(40))
            queued(llm._turns, 1)
        with llm._turns:  # the request is there, and its next turn comes after this one
            while llm.has_unfinished:
                llm.step()
        with pytest.raises(EngineError, match="taken, by another call"):
            run.result(PATIENCE_S)


@pytest.mark.parametrize("prompt", [np.array([1, 2, 3]), torch.tensor([1, 2, 3]), (1, 2, 3)])
def test_token_ids_may_be_arrays(llm, prompt):
    expected = ids(llm.generate([[1, 2, 3]], greedy(4)))
    assert ids(llm.generate([prompt], greedy(4))) == ids(llm.generate(prompt, greedy(4))) == expected


@pytest.mark.parametrize(
    "prompts", [b"abc", [b"abc"], None, 5, [None], HI, [HI, "hi"], [[1, 2], HI], {1, 2}, frozenset({"hi"}), [{1, 2}]]
)
def test_what_is_no_prompt(llm, prompts):
    with pytest.raises(RequestError, match="a prompt is text, token ids or messages, not"):
        llm.generate(prompts, greedy(1))
    with pytest.raises(RequestError, match="stream takes one prompt, not several"):
        llm.stream(["a", "b"])


def test_what_are_no_sampling_parameters(llm):
    for params in ({"temperature": 0}, [{"temperature": 0}], "greedy"):
        with pytest.raises(ConfigError, match=r"write SamplingParams|one for each"):
            llm.generate([[1, 2]], params)
    with pytest.raises(ConfigError, match=r"sampling_params is a dict; write SamplingParams\(temperature=0.7\)"):
        llm.stream([1, 2], {"temperature": 0})
    assert not llm.has_unfinished


def test_turns_go_round():
    """A thread that took step after step kept the others out."""
    turns, order = Turns(), []

    def work(name):
        for _ in range(3):
            with turns, turns:
                order.append(name)
                queued(turns, min(3, 12 - len(order)))  # until all that want another turn have asked for it

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    with turns:
        for count, thread in enumerate(threads, start=1):
            thread.start()
            queued(turns, count)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert "".join(order) == "abcd" * 3


def test_an_interrupted_wait_gives_up_its_turn():
    turns, has_turn = Turns(), threading.Event()

    def hold():
        with turns:
            has_turn.set()
            queued(turns, 1)
            after.start()
            queued(turns, 2)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            queued(turns, 1)

    def use():
        with turns:
            used.append(True)

    used, holder, after = [], threading.Thread(target=hold), threading.Thread(target=use)
    saved = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        holder.start()
        assert has_turn.wait(PATIENCE_S)
        with pytest.raises(KeyboardInterrupt), turns:
            used.append(False)
    finally:
        signal.signal(signal.SIGUSR1, saved)
    holder.join(PATIENCE_S)
    after.join(PATIENCE_S)
    with turns:
        assert used == [True]
    assert turns.waiting == 0

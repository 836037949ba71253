"""The whole engine against transformers: greedy float32 ids stay equal whatever the engine does with the requests."""

from __future__ import annotations

import pytest
import torch
from test_parity import FAMILIES, NEW_TOKENS, greedy, randomise
from transformers import AutoModelForCausalLM

from nanoinfer import LLM, ConfigError, EngineConfig, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)

ENGINES = {
    "default": {},
    "no prefix cache": {"enable_prefix_caching": False},
    "prefill-first": {"schedule": "prefill-first"},
    "chunk 1": {"max_prefill_chunk": 1},
    "chunk 3": {"max_prefill_chunk": 3, "schedule": "prefill-first"},
    "chunk block-1": {"max_prefill_chunk": 15},
    "chunk block": {"max_prefill_chunk": 16},
    "chunk block+1": {"max_prefill_chunk": 17},
    "block size 256": {"block_size": 256, "num_blocks": 16},
    "small budget": {"max_num_batched_tokens": 9, "max_num_seqs": 9},
    "two at a time": {"max_num_seqs": 2},
    "preemption": {"num_blocks": 16, "max_num_seqs": 9},
    "preemption, prefill-first": {"num_blocks": 16, "schedule": "prefill-first", "enable_prefix_caching": False},
}


@pytest.fixture(scope="module", params=["qwen3-gqa2", "qwen2-gqa7-bias", "llama-llama3-rope", "mistral-gqa2"])
def case(request, tmp_path_factory):
    """(folder, 9 prompts of different lengths, some with a common prefix, transformers' greedy tokens)."""
    torch.manual_seed(2)
    config = FAMILIES[request.param]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    randomise(model)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    common = torch.randint(0, config.vocab_size, (48,)).tolist()
    own = [torch.randint(0, config.vocab_size, (n,)).tolist() for n in (70, 1, 2, 15, 16, 17, 33, 5, 9)]
    prompts = [common[: 16 * (i % 4)] + tail for i, tail in enumerate(own)]
    return folder, prompts, [greedy(model, prompt) for prompt in prompts]


@pytest.mark.parametrize("options", ENGINES.values(), ids=list(ENGINES))
def test_ids_equal_transformers_under_every_way_to_schedule(case, options):
    folder, prompts, expected = case
    with LLM(str(folder), device="cpu", dtype="float32", **({"num_blocks": 256} | options)) as llm:
        events = llm.events.subscribe()
        outputs = llm.generate(prompts, GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        again = llm.generate(prompts[:1], GREEDY)
        assert again[0].outputs[0].token_ids == expected[0]
        if not options.get("enable_prefix_caching", True) or "block_size" in options:
            assert again[0].usage.cached_tokens == 0
        elif options.get("num_blocks") != 16:  # where its blocks cannot have been evicted
            assert again[0].usage.cached_tokens == 64
        assert llm.check_integrity() == []
        preemptions = sum(event.preemptions for event in events.drain())
        assert (preemptions > 0) == (options.get("num_blocks") == 16 and "block_size" not in options)


def test_samples_of_one_prompt_share_its_blocks_and_its_greedy_tokens(case):
    folder, prompts, expected = case
    with LLM(str(folder), device="cpu", dtype="float32", num_blocks=256) as llm:
        subscription = llm.events.subscribe()
        params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, n=4)
        output = llm.generate(prompts[:1], params)[0]
        assert [sample.token_ids for sample in output.outputs] == [expected[0]] * 4
        full_blocks = (len(prompts[0]) - 1) // 16
        assert sum(event.cached_tokens for event in subscription.drain()) == 3 * full_blocks * 16


def test_an_interrupted_call_leaves_an_empty_usable_engine(case):
    """Ctrl-C in generate() left sequences behind, and the next call returned them too."""
    folder, prompts, expected = case
    with LLM(str(folder), device="cpu", dtype="float32", num_blocks=256) as llm:
        run = llm._executor._runner.run
        calls = []

        def interrupted(batch):
            calls.append(batch)
            if len(calls) == 4:
                raise KeyboardInterrupt
            return run(batch)

        llm._executor._runner.run = interrupted
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, GREEDY)
        assert not llm.has_unfinished
        assert llm.check_integrity() == []
        outputs = llm.generate(prompts[:2], GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == expected[:2]


def test_streams_may_interleave_and_end_early(case):
    """Two streams at once, a generate() inside a stream, and an abort inside its loop each hung."""
    folder, prompts, expected = case
    with LLM(str(folder), device="cpu", num_blocks=256) as llm:
        first, second = llm.stream(prompts[0], GREEDY), llm.stream(prompts[1], GREEDY)
        tokens = {0: [], 1: []}
        for a, b in zip(first, second, strict=True):
            tokens[0] += a.token_ids
            tokens[1] += b.token_ids
        assert [tokens[0], tokens[1]] == expected[:2]
        seen = []
        for delta in llm.stream(prompts[2], GREEDY):
            seen += delta.token_ids
            if len(seen) == 3:
                assert llm.generate(prompts[3], GREEDY)[0].outputs[0].token_ids == expected[3]
        assert seen == expected[2]
        seen = []
        for delta in llm.stream(prompts[0], GREEDY):
            seen += delta.token_ids
            if len(seen) == 5:
                llm.abort(delta.request_id)
        assert seen == expected[0][:5]
        llm.stream(prompts[4], GREEDY).close()
        assert not llm.has_unfinished


def test_a_stream_that_is_dropped_in_the_middle_of_a_step_ends_after_it(case, monkeypatch):
    """The garbage collector runs wherever it likes, also between two lines of the scheduler."""
    folder, prompts, _ = case
    with LLM(str(folder), device="cpu", num_blocks=256) as llm:
        streams = [llm.stream(prompts[0], GREEDY)]
        dropped = streams[0].request_id
        other = llm.submit(prompts[1], GREEDY)
        next(streams[0])
        postprocess = llm._engine.scheduler.postprocess

        def collecting(*arguments):
            while streams:
                streams.clear()
                assert llm.is_running(dropped)
            return postprocess(*arguments)

        monkeypatch.setattr(llm._engine.scheduler, "postprocess", collecting)
        deltas = llm.step()
        assert not llm.is_running(dropped)
        while llm.has_unfinished:
            deltas += llm.step()
        assert {delta.request_id for delta in deltas} == {other}
        assert llm.check_integrity() == []


def test_options_that_would_be_ignored_are_refused(case):
    folder, prompts, _ = case
    with LLM(EngineConfig(model=str(folder), device="cpu", num_blocks=64)) as llm:
        with pytest.raises(ConfigError, match="prompts: 2, sampling parameters: 0"):
            llm.generate(prompts[:2], [])
        with pytest.raises(ConfigError, match="chat template"):
            llm.generate(prompts[:1], GREEDY, template_options={"enable_thinking": True})
    with pytest.raises(ConfigError, match="did you mean 'num_blocks'"):
        LLM(str(folder), num_block=3)
    with pytest.raises(ConfigError, match="both given"):
        LLM(EngineConfig(model=str(folder)), num_blocks=3)

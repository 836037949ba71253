"""The built-in model against transformers on the same weights: greedy float32 ids under every schedule."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanoinfer import LLM, SamplingParams

NEW_TOKENS = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)

CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Answer in one sentence."}, {"role": "user", "content": "Why is the sky blue?"}],
    [
        {"role": "user", "content": "Pick a colour."},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "Now write a line about it."},
    ],
    [{"role": "user", "content": "Count from 1 to 12, then 2024 and 3.14159."}],
]
TEXTS = [
    "The old lighthouse keeper climbed the stairs and",
    "def fibonacci(n):\n",
    "Dnes je krásný den 🌞 a",
    "1, 1, 2, 3, 5, 8, 13, 21,",
]

ENGINES = {
    "default": {},
    "no cache, prefill-first": {"enable_prefix_caching": False, "schedule": "prefill-first"},
    "chunk 1": {"max_prefill_chunk": 1},
    "chunk 3": {"max_prefill_chunk": 3},
    "chunk block+1": {"max_prefill_chunk": 17},
    "block size 256": {"block_size": 256, "num_blocks": 12},
    "preemption": {"num_blocks": 28},
}


@pytest.fixture(scope="module")
def reference(smollm2_folder):
    """(prompt ids of the chats and texts, transformers' greedy tokens)."""
    with LLM(str(smollm2_folder), device="cpu", num_blocks=64) as llm:
        prompts = [llm.encode(prompt)[1] for prompt in (*CHATS, *TEXTS)]
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    known = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=known, max_new_tokens=NEW_TOKENS, do_sample=False,
            eos_token_id=None, pad_token_id=0, temperature=None, top_p=None, top_k=None,
        )  # fmt: skip
    expected = out[:, width:].tolist()
    return prompts, expected


@pytest.mark.parametrize("options", ENGINES.values(), ids=list(ENGINES))
def test_greedy_ids_equal_transformers(smollm2_folder, reference, options):
    prompts, expected = reference
    with LLM(str(smollm2_folder), device="cpu", dtype="float32", **({"num_blocks": 512} | options)) as llm:
        subscription = llm.events.subscribe()
        outputs = llm.generate(prompts, GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert llm.check_integrity() == []
        preempted = sum(event.preemptions for event in subscription.drain())
        assert (preempted > 0) == (options.get("num_blocks") == 28)


def test_one_at_a_time_equals_transformers_too(smollm2_folder, reference):
    prompts, expected = reference
    with LLM(str(smollm2_folder), device="cpu", dtype="float32", max_num_seqs=1, num_blocks=512) as llm:
        outputs = llm.generate(prompts[2:5], GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == expected[2:5]


def test_samples_of_a_prompt_equal_transformers_too(smollm2_folder, reference):
    prompts, expected = reference
    with LLM(str(smollm2_folder), device="cpu", dtype="float32", num_blocks=256) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, n=3)
        output = llm.generate([prompts[1]], params)[0]
        assert [sample.token_ids for sample in output.outputs] == [expected[1]] * 3


def test_bfloat16_agrees_with_float32_on_most_first_tokens(smollm2_folder, reference, record_property):
    """Top-1 agreement and logprob distance on the float32 tokens' own prefixes, teacher-forced."""
    prompts, expected = reference
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=0)
    forced = [prompt + tokens[:k] for prompt, tokens in zip(prompts, expected, strict=True) for k in range(0, 24, 3)]
    runs = {}
    for dtype in ("float32", "bfloat16"):
        with LLM(str(smollm2_folder), device="cpu", dtype=dtype, num_blocks=512) as llm:
            runs[dtype] = [output.outputs[0] for output in llm.generate(forced, one)]
    pairs = list(zip(runs["float32"], runs["bfloat16"], strict=True))
    equal = [a.token_ids == b.token_ids for a, b in pairs]
    distance = [abs(a.logprobs[0].logprob - b.logprobs[0].logprob) for a, b in pairs if a.token_ids == b.token_ids]
    agreement = sum(equal) / len(equal)
    record_property("bfloat16 top-1 agreement", agreement)
    record_property("bfloat16 mean logprob distance", sum(distance) / len(distance))
    assert agreement >= 0.9
    assert sum(distance) / len(distance) < 0.1

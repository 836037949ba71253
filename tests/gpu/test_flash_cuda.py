"""flash-attn on a GPU against the torch back end: single steps, and whole answers under CUDA graphs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("flash_attn")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

sys.path.append(str(Path(__file__).parents[1] / "model"))
from attention_cases import CHUNKS, DECODES, StoreOnly, make_case, twin  # noqa: E402


@pytest.mark.parametrize("heads", [(16, 8, 128), (9, 3, 64), (7, 1, 96)], ids=str)
@pytest.mark.parametrize("work", [DECODES, CHUNKS, DECODES + CHUNKS, [(0, 300), (0, 77)]], ids=["d", "c", "dc", "p"])
def test_steps_equal_the_slow_twin(work, heads):
    from dataclasses import replace

    from nanoinfer.attention.flash import FlashAttention
    from nanoinfer.kernels.heads import NO_QK_NORM, HeadLayout

    num_decodes = len(DECODES) if work[: len(DECODES)] == DECODES else 0
    qkv, batch, caches = make_case(work, num_decodes, heads, 256, torch.bfloat16)
    tensors = ("positions", "slot_mapping", "cu_seqlens_q", "context_lens", "block_tables")
    batch = replace(batch, **{name: getattr(batch, name).cuda() for name in tensors})
    qkv, caches = qkv.cuda(), tuple(cache.cuda() for cache in caches)
    backend = FlashAttention(HeadLayout(*heads, scale=heads[2] ** -0.5), torch.empty(0), StoreOnly())
    out = backend.plan(batch).run(qkv, NO_QK_NORM, caches).view(len(qkv), heads[0], heads[2])
    torch.testing.assert_close(out, twin(qkv, batch, caches, heads), atol=2e-2, rtol=2e-2)


def test_greedy_answers_agree_with_the_torch_back_end(tmp_path):
    import random

    from transformers import AutoModelForCausalLM, Qwen3Config

    from nanoinfer import LLM, SamplingParams

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=5003, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=128, max_position_embeddings=2048, initializer_range=0.08,
        tie_word_embeddings=False, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    rng = random.Random(0)
    prompts = [[rng.randrange(5003) for _ in range(n)] for n in (70, 1, 600, 33)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
    runs = []
    for options in (
        {"attention": "torch", "kernels": "eager", "enforce_eager": True},
        {"attention": "flash-attn"},
        {"attention": "flash-attn", "max_prefill_chunk": 100},
    ):
        with LLM(str(tmp_path), device="cuda", max_model_len=1024, num_blocks=64, **options) as llm:
            runs.append([output.outputs[0] for output in llm.generate(prompts, params)])
            assert llm.info.block_size == (256 if "flash" in str(options) else 16)
    for plain, *flash in zip(*runs, strict=True):
        for sample in flash:
            equal = 0
            while equal < 24 and plain.token_ids[equal] == sample.token_ids[equal]:
                equal += 1
            for ours, theirs in zip(sample.logprobs[:equal], plain.logprobs[:equal], strict=True):
                assert abs(ours.logprob - theirs.logprob) < 0.1
            assert equal >= 8, (plain.token_ids, sample.token_ids)

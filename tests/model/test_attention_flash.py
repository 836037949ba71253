"""What FlashAttention passes to the package's calls, with the slow twin in the package's place, and when it is refused.

The package itself is tried in tests/gpu.
"""

from __future__ import annotations

import sys
import types

import pytest
import torch
from attention_cases import CHUNKS, DECODES, StoreOnly, make_case, twin

from nanoinfer.attention import flash
from nanoinfer.kernels import reference
from nanoinfer.kernels.heads import NO_QK_NORM, HeadLayout


@pytest.fixture
def calls(monkeypatch):
    """Installs a flash_attn with the real one's signatures; returns the names of the calls that are made."""
    made = []

    def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, block_table, softmax_scale, causal):
        made.append("decode")
        assert causal
        assert q.shape[1] == 1
        starts = torch.arange(len(q) + 1)
        out = reference.paged_attention(
            q.squeeze(1), k_cache, v_cache, block_table, starts, cache_seqlens, softmax_scale
        )
        return out.unsqueeze(1)

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, softmax_scale, causal, block_table
    ):
        made.append("prefill" if block_table is None else "paged prefill")
        assert causal
        lengths = cu_seqlens_k.diff()
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert cu_seqlens_q.diff().max() <= max_seqlen_q
        assert lengths.max() <= max_seqlen_k
        if block_table is None:
            assert torch.equal(cu_seqlens_q, cu_seqlens_k)
            return reference.varlen_attention(q, k, v, cu_seqlens_q, softmax_scale)
        return reference.paged_attention(q, k, v, block_table, cu_seqlens_q, lengths, softmax_scale)

    package = types.SimpleNamespace(
        flash_attn_with_kvcache=flash_attn_with_kvcache, flash_attn_varlen_func=flash_attn_varlen_func
    )
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    return made


@pytest.mark.parametrize(
    ("work", "kinds"),
    [
        (DECODES, ["decode"]),
        (CHUNKS, ["paged prefill"]),
        ([(0, 5), (0, 33)], ["prefill"]),
        (DECODES + CHUNKS, ["decode", "paged prefill"]),
        ([*DECODES, (0, 9)], ["decode", "prefill"]),
    ],
    ids=str,
)
def test_equals_the_slow_twin(calls, work, kinds):
    heads = (4, 2, 64)
    num_decodes = len(DECODES) if work[: len(DECODES)] == DECODES else 0
    qkv, batch, caches = make_case(work, num_decodes, heads, 256)
    backend = flash.FlashAttention(HeadLayout(*heads, scale=heads[2] ** -0.5), torch.empty(0), StoreOnly())
    out = backend.plan(batch).run(qkv, NO_QK_NORM, caches).view(len(qkv), 4, 64)
    torch.testing.assert_close(out, twin(qkv, batch, caches, heads), atol=2e-5, rtol=1e-4)
    assert calls == kinds


def test_refused_with_the_reason(monkeypatch):
    cuda, cpu, narrow = torch.device("cuda"), torch.device("cpu"), torch.bfloat16
    assert "CUDA" in flash.why_not(cpu, narrow, 128, 256)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "not installed" in flash.why_not(cuda, narrow, 128, 256)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert "float32" in flash.why_not(cuda, torch.float32, 128, 256)
    assert "512" in flash.why_not(cuda, narrow, 512, 256)
    assert "64" in flash.why_not(cuda, narrow, 128, 64)
    assert flash.why_not(cuda, narrow, 128, 512) is None

"""How far bfloat16 takes a random Qwen3-8B from float32, without our kernels: what a comparison of tokens can expect.

    python benchmarks/rounding_cpu.py [LAYERS]

24 tokens go through the layers three times: in float32, in bfloat16 as transformers rounds, and rounded where the
persistent kernel rounds (the norm's factor scales the product's sums). About 3 s a layer on two cores.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.nn.functional as F
from torch import Tensor

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB = 4096, 32, 8, 128, 12288, 30_000
TOKENS, EPS = 24, 1e-6
GENERATOR = torch.Generator().manual_seed(0)


def weight(rows: int, columns: int) -> Tensor:
    return torch.empty(rows, columns).normal_(0, 0.02, generator=GENERATOR).bfloat16().float()


def factor(x: Tensor) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


class Stream:
    """A hidden state [TOKENS, HIDDEN] on its way through the layers, float32 numbers rounded to dtype."""

    def __init__(self, hidden: Tensor, dtype: torch.dtype, *, factor_last: bool = False) -> None:
        self.hidden, self.dtype, self.factor_last = hidden, dtype, factor_last

    def rounded(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).float()

    def normed_product(self, matrix: Tensor) -> Tensor:
        if self.factor_last:
            return (self.hidden @ matrix.T) * factor(self.hidden)
        return self.rounded(self.hidden * factor(self.hidden)) @ matrix.T

    def layer(self, qkv: Tensor, o: Tensor, gate_up: Tensor, down: Tensor, cos: Tensor, sin: Tensor) -> None:
        widths = [heads * HEAD_DIM for heads in (HEADS, KV_HEADS, KV_HEADS)]
        q, k, v = (x.view(TOKENS, -1, HEAD_DIM) for x in self.rounded(self.normed_product(qkv)).split(widths, -1))
        q, k = (self.rounded(rotated(self.rounded(x * factor(x)), cos, sin)) for x in (q, k))
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        attended = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), is_causal=True)
        attended = self.rounded(attended.transpose(0, 1).flatten(1))
        self.hidden = self.rounded(self.hidden + attended @ o.T)
        inner = self.normed_product(gate_up)
        gate, up = (inner if self.factor_last else self.rounded(inner)).chunk(2, -1)
        self.hidden = self.rounded(self.hidden + self.rounded(F.silu(gate) * up) @ down.T)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@torch.inference_mode()
def main(layers: int) -> None:
    angles = torch.outer(torch.arange(TOKENS), 1e6 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))[:, None]
    start = weight(TOKENS, HIDDEN)
    exact = Stream(start, torch.float32)
    streams = {
        "bfloat16": Stream(start, torch.bfloat16),
        "bfloat16, factor last": Stream(start, torch.bfloat16, factor_last=True),
    }
    for _ in range(layers):
        matrices = (
            weight((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
            weight(HIDDEN, HEADS * HEAD_DIM),
            weight(2 * INNER, HIDDEN),
            weight(HIDDEN, INNER),
        )
        for stream in (exact, *streams.values()):
            stream.layer(*matrices, angles.cos(), angles.sin())
    head = weight(VOCAB, HIDDEN)
    wanted = exact.normed_product(head).log_softmax(-1)
    best, tokens = wanted.max(-1)
    for name, stream in streams.items():
        logprobs = stream.normed_product(head).log_softmax(-1)
        print(json.dumps({
            "rounding": name,
            "hidden": round(((stream.hidden - exact.hidden).norm() / exact.hidden.norm()).item(), 4),
            "largest logprob distance of the best token": round(
                (logprobs.gather(1, tokens[:, None])[:, 0] - best).abs().max().item(), 3
            ),
            "best token kept": (logprobs.argmax(-1) == tokens).float().mean().item(),
        }))  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 36)

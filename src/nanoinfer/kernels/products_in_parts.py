"""Products back to the hidden width, each as two half products whose sum the next norm makes.

At about 200 tokens such a product has too few tiles for all cores. cuBLAS then cuts its sum in two by itself, and adds
the halves, then the residual, in a kernel of its own; the norm that follows can do that on its way (decision 067).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.kernels import activation, norm
from nanoinfer.kernels.common import is_hopper
from nanoinfer.kernels.layer_products import LayerProducts

MIN_TOKENS, MAX_TOKENS = 192, 256  # where it was measured to gain, on an H200
NARROW = 2048  # hidden sizes up to here: the output projection gains too
PARTS = 2


def pays(hidden: Tensor, products: LayerProducts) -> bool:
    """Whether this gains for hidden [T, H]; known for Hopper GPUs alone."""
    even = all(weight.shape[1] % (8 * PARTS) == 0 for weight in (products.o, products.down))
    fits = MIN_TOKENS <= len(hidden) <= MAX_TOKENS and even and hidden.dtype != torch.float32
    return fits and is_hopper(hidden.device)


def between_attentions(attended: Tensor, hidden: Tensor, products: LayerProducts) -> tuple[Tensor, Tensor]:
    """As in `KernelSet`."""
    if products.o.shape[0] <= NARROW:
        normed, hidden = norm.sum_rms_norm(in_parts(attended, products.o), hidden, products.norm, products.eps)
    else:
        hidden = hidden.addmm_(attended, products.o.t())
        normed = norm.rms_norm(hidden, products.norm, products.eps)
    inner = activation.silu_mul(F.linear(normed, products.gate_up))
    parts = in_parts(inner, products.down)
    normed, hidden = norm.sum_rms_norm(parts, hidden, products.next_norm, products.eps)
    return hidden, F.linear(normed, products.next_qkv, products.next_qkv_bias)


def in_parts(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K], weight [N, K] -> float32 [PARTS, T, N], whose sum is x @ weight.T."""
    (tokens, width), features = x.shape, len(weight)
    x = x.view(tokens, PARTS, width // PARTS).transpose(0, 1)
    weight = weight.view(features, PARTS, width // PARTS).permute(1, 2, 0)
    if x.is_cuda:
        return torch.bmm(x, weight, out_dtype=torch.float32)
    return torch.bmm(x.float(), weight.float())  # nowhere else can bmm keep its sums in float32

"""What the interpreter cannot show of the kernels: addresses beyond 32 bits, CUDA graphs, dependent launches."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from kernel_inputs import assert_close, normal, paged_cache

from nanoinfer.kernels import (
    activation,
    decode_attention,
    decode_splits,
    few_decodes_attention,
    few_tokens_matmul,
    gemv,
    norm,
    peer_exchange,
    persistent_layer,
    prefill_attention,
    reference,
    rope,
    sampling,
    skinny_matmul,
)
from nanoinfer.kernels.common import is_hopper
from nanoinfer.kernels.layer_cuts import layer_cuts
from nanoinfer.kernels.layer_products import LayerProducts

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
HEADS, KV_HEADS, HEAD_DIM, EPS = 4, 2, 128, 1e-6
SCALE = HEAD_DIM**-0.5
HIDDEN, INNER = 512, 768


def rope_table(positions):
    angles = torch.rand(positions, HEAD_DIM // 2, generator=torch.Generator().manual_seed(0)) * 6
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(DEVICE)


def fused_forms(batch: int) -> list:
    """The fused form of decode attention, and before it that of a few sequences where the batch is so small."""
    small = decode_splits.is_small(batch, KV_HEADS, DEVICE)
    few = [few_decodes_attention.few_decodes_attention] if small else []
    return [*few, decode_attention.fused_decode_attention]


@pytest.mark.parametrize("block_size", [16, 64])
def test_slots_beyond_two_to_the_31_elements(block_size):
    """The symptom of a slot times a stride in 32 bits is silent corruption at 2.1 M tokens of 8 x 128."""
    elements_per_block = block_size * KV_HEADS * HEAD_DIM
    first_block = 2**31 // elements_per_block + 7
    if torch.cuda.mem_get_info()[0] < 5 * 2**31:
        pytest.skip("needs 10 GiB of GPU memory")
    lengths = [70, 33]
    cache = paged_cache(lengths, block_size, KV_HEADS, HEAD_DIM, dtype=BF16, device=DEVICE, first_block=first_block)
    cos_sin = rope_table(128)
    workspace = decode_attention.DecodeWorkspace.for_batches(2, HEADS, KV_HEADS, HEAD_DIM, DEVICE)

    slots = torch.stack([cache.slots(i, torch.tensor(n - 1, device=DEVICE)) for i, n in enumerate(lengths)])
    qkv = normal(2, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=BF16, device=DEVICE)
    stored = (qkv, None, None, EPS, cos_sin, cache.lengths.long() - 1, cache.k, cache.v, slots)
    q, k, _ = rope.qk_norm_rope_store(*stored, HEADS, KV_HEADS, HEAD_DIM)
    assert torch.equal(cache.k.view(-1, KV_HEADS, HEAD_DIM)[slots], k)

    starts = torch.arange(3, dtype=torch.int32, device=DEVICE)
    expected = reference.paged_attention(q, cache.k, cache.v, cache.tables, starts, cache.lengths, SCALE)
    attended = decode_attention.decode_attention(q, cache.k, cache.v, cache.tables, cache.lengths, SCALE, workspace)
    assert_close(attended, expected)
    for attend in fused_forms(2):
        fused = attend(
            qkv, None, None, EPS, cos_sin, cache.k, cache.v, slots, cache.tables, cache.lengths, SCALE, HEADS, workspace
        )
        assert_close(fused.view_as(expected), expected)
    for use_tma in (True, False):
        config = prefill_attention.PrefillConfig(64, 64, 4, 3, use_tma)
        chunk = prefill_attention.paged_prefill_attention(
            q, cache.k, cache.v, cache.tables, starts, cache.lengths, 1, SCALE, config=config
        )
        assert_close(chunk, expected)


class Step:
    """Two decoder layers and the LM head, made of the kernels as a decode step uses them."""

    def __init__(self, batch: int, attend) -> None:
        self.attend = attend

        def matrix(rows: int, columns: int, seed: int) -> torch.Tensor:
            return normal(rows, columns, dtype=BF16, device=DEVICE, seed=seed) * columns**-0.5

        width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        self.layers = [
            {
                "qkv": matrix(width, HIDDEN, i),
                "o": matrix(HIDDEN, HEADS * HEAD_DIM, i),
                "gate_up": matrix(2 * INNER, HIDDEN, i),
                "down": matrix(HIDDEN, INNER, i),
                "norm": normal(HIDDEN, dtype=BF16, device=DEVICE, seed=i),
                "head": normal(HEAD_DIM, dtype=BF16, device=DEVICE, seed=i),
            }
            for i in range(2)
        ]
        self.head = matrix(3001, HIDDEN, 9)
        self.caches = [
            paged_cache([300] * batch, 16, KV_HEADS, HEAD_DIM, dtype=BF16, device=DEVICE) for _ in self.layers
        ]
        self.tables = self.caches[0].tables
        self.lengths = torch.ones(batch, dtype=torch.int32, device=DEVICE)
        self.slots = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
        self.x = normal(batch, HIDDEN, dtype=BF16, device=DEVICE)
        self.cos_sin = rope_table(512)
        self.seeds = torch.arange(batch, device=DEVICE)
        self.temperatures = torch.full((batch,), 0.7, device=DEVICE)
        self.workspace = decode_attention.DecodeWorkspace.for_batches(batch, HEADS, KV_HEADS, HEAD_DIM, DEVICE)

    def set_lengths(self, lengths: list[int]) -> None:
        """The inputs of a step, written in place as the owner of a CUDA graph writes them; length 0 is padding."""
        self.lengths.copy_(torch.tensor(lengths))
        last = (self.lengths.long() - 1).clamp(min=0)
        rows = torch.arange(len(lengths), device=DEVICE)
        slots = self.tables[rows, last // 16].long() * 16 + last % 16
        self.slots.copy_(torch.where(self.lengths > 0, slots, -1))

    def run(self, linear) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x + 0  # a step begins with a launch that is no dependent one, as the embedding is
        for w, cache in zip(self.layers, self.caches, strict=True):
            qkv = linear(x, w["qkv"], norm_weight=w["norm"], eps=EPS)
            attended = self.attend(
                qkv, w["head"], w["head"], EPS, self.cos_sin, cache.k, cache.v, self.slots, self.tables, self.lengths,
                SCALE, HEADS, self.workspace,
            )  # fmt: skip
            x = linear(attended.flatten(1), w["o"], residual=x)
            inner = linear(x, w["gate_up"], norm_weight=w["norm"], eps=EPS, swiglu=True)
            x = linear(inner, w["down"], residual=x)
        ids, _ = sampling.head_best(
            x, self.head, self.temperatures, self.seeds, self.lengths.long(), norm_weight=w["norm"], eps=EPS
        )
        return x, ids


def library_linear(x, weight, *, norm_weight=None, eps=0.0, residual=None, swiglu=False):
    if norm_weight is not None:
        x = norm.rms_norm(x, norm_weight, eps)
    out = torch.nn.functional.linear(x, weight)
    if swiglu:
        out = activation.silu_mul(out)
    return out if residual is None else out + residual


@pytest.mark.parametrize(
    ("batch", "linear", "form"),
    [
        (1, gemv.gemv, 0),
        (1, skinny_matmul.skinny_matmul, 0),
        (3, skinny_matmul.skinny_matmul, 1),
        (16, skinny_matmul.skinny_matmul, 0),
        (16, skinny_matmul.skinny_matmul, 1),
    ],
)
def test_a_graph_of_dependent_launches_equals_one_launch_after_the_other(batch, linear, form, monkeypatch):
    step = Step(batch, fused_forms(batch)[form])
    step.set_lengths([150] * batch)
    step.run(linear)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step.run(linear)
    for module in (gemv, skinny_matmul, norm, decode_attention, few_decodes_attention, sampling):
        monkeypatch.setattr(module, "pdl_options", lambda x: {"PDL": False})
    for lengths in ([150] * batch, [1] * batch, list(range(290, 290 - batch, -1)), [0] + [129] * (batch - 1)):
        step.set_lengths(lengths)
        expected = step.run(linear)
        library = step.run(library_linear)
        torch.cuda.synchronize()
        for _ in range(20):
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(captured[0], expected[0]), lengths
            assert torch.equal(captured[1], expected[1]), lengths
        error = (captured[0].double() - library[0].double()).norm() / library[0].double().norm()
        assert error < 3e-2, error


@pytest.mark.parametrize("batch", [1, 2, 5, 33, 64])
def test_fused_decode_at_the_shapes_that_are_chosen_for_a_batch(batch):
    lengths = [1 + (37 * i) % 700 for i in range(batch)]
    cache = paged_cache(lengths, 16, KV_HEADS, HEAD_DIM, dtype=BF16, device=DEVICE)
    cos_sin = rope_table(1024)
    slots = torch.stack([cache.slots(i, torch.tensor(n - 1, device=DEVICE)) for i, n in enumerate(lengths)])
    qkv = normal(batch, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=BF16, device=DEVICE)
    weight = normal(HEAD_DIM, dtype=BF16, device=DEVICE)
    workspace = decode_attention.DecodeWorkspace.for_batches(batch, HEADS, KV_HEADS, HEAD_DIM, DEVICE)
    inputs = (weight, weight, EPS, cos_sin, cache.k, cache.v, slots, cache.tables, cache.lengths, SCALE, HEADS)
    actual = [attend(qkv, *inputs, workspace) for attend in fused_forms(batch)]
    q, _, _ = reference.qk_norm_rope_store(
        qkv, weight, weight, EPS, cos_sin, cache.lengths.long() - 1, cache.k, cache.v, slots, HEADS, KV_HEADS, HEAD_DIM
    )
    starts = torch.arange(batch + 1, device=DEVICE)
    expected = reference.paged_attention(q, cache.k, cache.v, cache.tables, starts, cache.lengths, SCALE)
    for one in actual:
        assert_close(one, expected)


@pytest.mark.parametrize(
    ("features", "width"), [(2048, 1024), (1024, 2048), (1000, 3072), (640, 896), (72, 128), (3072, 4096)]
)
@pytest.mark.parametrize("fused", ["norm", "norm+swiglu", "bias+residual"])
@pytest.mark.skipif(not is_hopper(DEVICE), reason="needs a Hopper GPU")
def test_products_of_some_tokens_as_they_are_chosen(features, width, fused):
    """The streamed form has no interpreter. Twice each: the counters of the splits must be zero again."""
    options = {}
    if "norm" in fused:
        options |= {"norm_weight": normal(width, dtype=BF16, device=DEVICE), "eps": EPS}
    if "bias" in fused:
        options["bias"] = normal(features, dtype=BF16, device=DEVICE)
    rows = features * (2 if "swiglu" in fused else 1)
    weight = normal(rows, width, dtype=BF16, device=DEVICE, seed=1) * width**-0.5
    for tokens in (2, 16, 17, 32, 33, 64, 65, 100, 128):
        if few_tokens_matmul.chosen_config(tokens, rows, width, "swiglu" in fused) is None:
            continue
        x = normal(tokens, width + 8, dtype=BF16, device=DEVICE)[:, :width]
        if "residual" in fused:
            options["residual"] = normal(tokens, features, dtype=BF16, device=DEVICE)
        expected = product_twin(x, weight, swiglu="swiglu" in fused, **options)
        assert few_tokens_matmul.pays(tokens, weight, swiglu="swiglu" in fused)
        for _ in range(2):
            actual = few_tokens_matmul.few_tokens_matmul(x, weight, swiglu="swiglu" in fused, **options)
            assert_close(actual, expected)


def product_twin(x, weight, norm_weight=None, eps=0.0, bias=None, residual=None, swiglu=False):
    """In float32 throughout, rounded once."""
    wide = x.float() if norm_weight is None else reference.rms_norm(x.float(), norm_weight.float(), eps)
    out = wide @ weight.float().T
    if swiglu:
        out = reference.silu_mul(out)
    out = out if bias is None else out + bias.float()
    return (out if residual is None else out + residual.float()).to(BF16)


def layer_products(hidden, attended, inner, qkv, *, bias=False, seed=0):
    def weight(rows, width, number):
        return normal(rows, width, dtype=BF16, device=DEVICE, seed=seed + number) * width**-0.5

    return LayerProducts(
        o=weight(hidden, attended, 1),
        norm=normal(hidden, dtype=BF16, device=DEVICE, seed=seed + 2),
        gate_up=weight(2 * inner, hidden, 3),
        down=weight(hidden, inner, 4),
        next_norm=normal(hidden, dtype=BF16, device=DEVICE, seed=seed + 5),
        next_qkv=weight(qkv, hidden, 6),
        next_qkv_bias=normal(qkv, dtype=BF16, device=DEVICE, seed=seed + 7) if bias else None,
        eps=EPS,
    )


def layer_twin(attended, hidden, products):
    """Rounded where the layer's results are: in float32 otherwise."""
    hidden = product_twin(attended, products.o, residual=hidden)
    inner = product_twin(hidden, products.gate_up, norm_weight=products.norm, eps=EPS, swiglu=True)
    hidden = product_twin(inner, products.down, residual=hidden)
    return hidden, product_twin(
        hidden, products.next_qkv, norm_weight=products.next_norm, eps=EPS, bias=products.next_qkv_bias
    )


def at_once(attended, hidden, products):
    cores = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    cuts = layer_cuts(products.o.shape[0], products.o.shape[1], products.down.shape[1], len(products.next_qkv), cores)
    return persistent_layer.persistent_layer(attended, hidden, products, cuts)


@pytest.mark.parametrize(
    "sizes",
    [
        (128, 128, 128, 8),
        (384, 256, 640, 1000),
        (1024, 2048, 3072, 4096),
        (2048, 2048, 6144, 4096),
        (3584, 3584, 18944, 4608),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.skipif(not is_hopper(DEVICE), reason="needs a Hopper GPU")
def test_a_layer_at_once_is_its_products_one_after_the_other(sizes, bias):
    """Twice each: counters of splits and meetings go on from where they are. A NaN stays in its token's row."""
    products = layer_products(*sizes, bias=bias)
    for tokens in (1, 2, 7, 16, 17, 32, 33, 64):
        hidden = normal(tokens, sizes[0], dtype=BF16, device=DEVICE, seed=tokens)
        attended = normal(tokens, sizes[1] + 8, dtype=BF16, device=DEVICE)[:, : sizes[1]]
        expected = layer_twin(attended, hidden, products)
        before = hidden.clone()
        first, second = at_once(attended, hidden, products), at_once(attended, hidden, products)
        for actual, again, wanted in zip(first, second, expected, strict=True):
            assert_close(actual, wanted)
            assert torch.equal(actual, again)
        assert torch.equal(hidden, before)
        hidden[-1] = float("nan")
        for actual, spoiled in zip(first, at_once(attended, hidden, products), strict=True):
            assert torch.equal(actual[:-1], spoiled[:-1])
            assert spoiled[-1].isnan().all()


@pytest.mark.parametrize("tokens", [2, 17, 64])
@pytest.mark.skipif(not is_hopper(DEVICE), reason="needs a Hopper GPU")
def test_layers_at_once_in_a_graph_equal_one_launch_after_the_other(tokens, monkeypatch):
    """Dependent launches: each starts with its weights while the one before still runs."""
    layers = [layer_products(1024, 2048, 3072, 4096, seed=10 * i) for i in range(6)]
    start = normal(tokens, 1024, dtype=BF16, device=DEVICE)
    attended = normal(tokens, 2048, dtype=BF16, device=DEVICE, seed=1)

    def run():
        hidden, qkv = start, None
        for products in layers:
            hidden, qkv = at_once(attended if qkv is None else qkv[:, :2048], hidden, products)
        return hidden, qkv

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    monkeypatch.setattr(persistent_layer, "pdl_options", lambda x: {"PDL": False})
    expected = run()
    torch.cuda.synchronize()
    for _ in range(50):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured[0], expected[0])
        assert torch.equal(captured[1], expected[1])


@pytest.mark.parametrize(
    ("capacity", "count", "dtype"),
    [(1024, 1024, BF16), (4096, 131_072, BF16), (8192, 262_144, torch.float32), (4096, 4096 * 31 * 2 + 62, BF16)],
)
def test_two_ranks_on_one_device_exchange_through_its_memory(capacity, count, dtype):
    """Each rank on a stream of its own. Both kernels are loaded first: loading waits for kernels that run."""
    nbytes = peer_exchange.PeerBuffers.nbytes(2, capacity)
    memory = [torch.zeros(nbytes // 4, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    addresses = [part.data_ptr() for part in memory]
    buffers = [peer_exchange.PeerBuffers.at(addresses, rank, capacity, DEVICE) for rank in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    fits = buffers[0].fits(torch.empty(count, dtype=dtype, device=DEVICE))
    for own in buffers:
        own.abort.fill_(1)
        peer_exchange.all_reduce(torch.zeros(count, dtype=dtype, device=DEVICE), own)
        if fits:
            peer_exchange.all_gather(torch.zeros(count, dtype=dtype, device=DEVICE), own)
        torch.cuda.synchronize()
        own.abort.zero_()
        own.numbers.zero_()
    for part in memory:
        part.zero_()
    for number in range(20):
        parts = [normal(count, dtype=dtype, device=DEVICE, seed=2 * number + rank) for rank in range(2)]
        total, both = (parts[0].float() + parts[1].float()).to(dtype), torch.stack(parts)
        torch.cuda.synchronize()
        for operation in (peer_exchange.all_gather, peer_exchange.all_reduce) if fits else (peer_exchange.all_reduce,):
            results = []
            for own, part, stream in zip(buffers, parts, streams, strict=True):
                with torch.cuda.stream(stream):
                    results.append(operation(part, own))
            torch.cuda.synchronize()
            expected = both if operation is peer_exchange.all_gather else total
            assert all(torch.equal(result, expected) for result in results)

"""All products of a layer between two attentions in one kernel, whose weights never stop coming (Gluon, Hopper).

Output projection, gate/up with SwiGLU, down projection and the next layer's QKV need each other's results, but their
weights need nothing. One program per core runs from the first to the last. One warp of it asks for the program's tiles
of all four weights, through a ring in shared memory (TMA); four multiply them with the tokens (wgmma). Between two
products all programs meet; meanwhile weights of the next one arrive.

A norm's factor belongs to a token, so it can wait. A product takes the hidden state times the norm's weight, which the
program that finishes a tile of it writes, together with the sums of its squares; what it gives is scaled at its end.
Rows of tokens beyond the last hold anything: a token is a column of every product and stays one.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanoinfer.kernels.common import is_hopper, pdl_options
from nanoinfer.kernels.layer_cuts import TILE_ROWS, TILE_WIDTH, LayerCuts, layer_cuts
from nanoinfer.kernels.layer_products import LayerProducts
from nanoinfer.kernels.thread_barrier import thread_barrier
from nanoinfer.kernels.weight_ring import PAIRS, ROWS, TILE, WARPS, fetch, make_ring, multiply

MIN_TOKENS, MAX_TOKENS = 2, 64
MIN_WEIGHTS = 2**25  # elements of a layer
SLOTS, STAGES = {16: 11, 32: 10, 64: 8}, {16: 8, 32: 6, 64: 4}  # by tokens: tiles of weights and of tokens under way
OUT = gl.constexpr(gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]))  # of 64 rows: eight neighbours to a thread
HALF_OUT = gl.constexpr(gl.BlockedLayout([8, 1], [4, 8], [1, 4], [0, 1]))  # of 32


class Scratch(NamedTuple):
    """Memory that programs hand each other results in."""

    weighted: object  # [BLOCK_M, H]: the hidden state times a norm's weight
    squares: object  # float32 [tiles of H, BLOCK_M]: sums over the hidden state's squares
    inner: object  # [BLOCK_M, I]
    partial: object  # float32 [tiles, splits, ROWS, BLOCK_M]
    counters: object  # int32 [programs / splits]: splits that are there; zero between products
    meetings: object  # int64 [1]: arrivals at all meetings of so many programs there ever were


@gluon.jit
def _fetch_all(o, gate_up, down, qkv, ring, CUTS: gl.constexpr, SLOTS: gl.constexpr):
    item = fetch(o, gl.program_id(0) * 0, ring, gl.constexpr(CUTS.o), SLOTS, False)
    item = fetch(gate_up, item, ring, gl.constexpr(CUTS.gate_up), SLOTS, True)
    item = fetch(down, item, ring, gl.constexpr(CUTS.down), SLOTS, False)
    fetch(qkv, item, ring, gl.constexpr(CUTS.qkv), SLOTS, False)


@gluon.jit
def _fence():
    """Between what is stored in the usual way and what the copy engine reads."""
    lane = gl.arange(0, 32 * WARPS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    gl.inline_asm_elementwise(
        "fence.proxy.async; mov.b32 $0, $1;", "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _meet(meetings_ptr, PROGRAMS: gl.constexpr):
    """Wait until all programs are here. What each has stored, all can read."""
    _fence()
    thread_barrier()  # all threads' stores come before the release
    ticket = gl.atomic_add(meetings_ptr, 1, sem="acq_rel")
    everybody = (ticket // PROGRAMS + 1) * PROGRAMS
    here = ticket + 1
    while here < everybody:
        here = gl.atomic_add(meetings_ptr, 0, sem="acquire")
    thread_barrier()
    _fence()


@gluon.jit
def _over_splits(sums, scratch, CUT: gl.constexpr, BLOCK_M: gl.constexpr):
    """The sums of all splits for the program that comes last, always added in the same order; and whether it is us."""
    TILES: gl.constexpr = CUT.tiles
    SPLITS: gl.constexpr = CUT.splits
    last = True
    if SPLITS > 1:
        SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
        group = gl.program_id(0) // SPLITS
        row = gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
        token = gl.arange(0, BLOCK_M, gl.SliceLayout(0, SUMS))
        at = scratch.partial + group * (TILES * SPLITS * ROWS * BLOCK_M) + row[:, None] * BLOCK_M + token[None, :]
        for tile in gl.static_range(TILES):
            ours = tile * SPLITS + gl.program_id(0) % SPLITS
            gl.store(at + ours * (ROWS * BLOCK_M), sums[tile])
        thread_barrier()  # all threads' stores come before the release
        last = gl.atomic_add(scratch.counters + group, 1, sem="acq_rel") == SPLITS - 1
        if last:
            thread_barrier()
            gl.store(scratch.counters + group, 0)
            parts = ()  # asked for all at once; written by other programs, so not from this core's L1
            for part in gl.static_range(TILES * SPLITS):
                parts = parts + (gl.load(at + part * (ROWS * BLOCK_M), cache_modifier=".cg"),)
            totals = ()
            for tile in gl.static_range(TILES):
                total = parts[tile * SPLITS]
                for split in gl.static_range(1, SPLITS):
                    total += parts[tile * SPLITS + split]
                totals = totals + (total,)
            sums = totals
    return sums, last


@gluon.jit
def _add_to_hidden(
    sums, hidden_ptr, out_ptr, norm_ptr, scratch, M, CUT: gl.constexpr, BLOCK_M: gl.constexpr
):  # fmt: skip
    """out [M, H] = hidden + sums, rounded, and of it what the norm and the product behind it need."""
    H: gl.constexpr = CUT.rows
    TILES: gl.constexpr = CUT.tiles
    first_tile = gl.program_id(0) // CUT.splits * TILES
    token = gl.arange(0, BLOCK_M, gl.SliceLayout(0, OUT))
    lane = gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
    old = ()
    norm_weights = ()
    for tile in gl.static_range(TILES):  # needed last, but then they would be waited for
        row = (first_tile + tile) * ROWS + lane
        inside = (row < H)[:, None] & (token < M)[None, :]
        at = hidden_ptr + token[None, :] * H + row[:, None]
        old = old + (gl.load(at, mask=inside, other=0.0, cache_modifier=".cg"),)
        norm_weights = norm_weights + (gl.load(norm_ptr + row, mask=row < H, other=0.0),)
    sums, last = _over_splits(sums, scratch, CUT, BLOCK_M)
    if last:
        for tile in gl.static_range(TILES):
            row = (first_tile + tile) * ROWS + lane
            inside = (row < H)[:, None] & (token < M)[None, :]
            place = token[None, :] * H + row[:, None]
            new = (gl.convert_layout(sums[tile], OUT) + old[tile].to(gl.float32)).to(gl.bfloat16)
            gl.store(out_ptr + place, new, mask=inside)
            new = new.to(gl.float32)
            weighted = new * norm_weights[tile].to(gl.float32)[:, None]
            gl.store(scratch.weighted + place, weighted.to(gl.bfloat16), mask=inside)
            gl.store(scratch.squares + (first_tile + tile) * BLOCK_M + token, gl.sum(new * new, 0))


@gluon.jit
def _norm_factors(squares_ptr, eps, H: gl.constexpr, ALL_TILES: gl.constexpr, BLOCK_M: gl.constexpr):
    """1 / root mean square of each token's hidden state: float32 [BLOCK_M]."""
    TABLE: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [WARPS, 1], [1, 0])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    tile = gl.arange(0, ALL_TILES, gl.SliceLayout(1, TABLE))
    token = gl.arange(0, BLOCK_M, gl.SliceLayout(0, TABLE))
    at = squares_ptr + tile[:, None] * BLOCK_M + token[None, :]
    there = gl.broadcast((tile * ROWS < H)[:, None], at)[0]
    squares = gl.sum(gl.load(at, mask=there, other=0.0, cache_modifier=".cg"), 0)
    return gl.convert_layout(gl.rsqrt(squares / H + eps), gl.SliceLayout(0, SUMS))


@gluon.jit
def _store_swiglu(sums, factors, inner_ptr, M, CUT: gl.constexpr, BLOCK_M: gl.constexpr):
    """silu(gate) * up: inner [M, I]. A tile has eight gate rows, then their up rows, and so on."""
    INNER: gl.constexpr = CUT.rows // 2
    for tile in gl.static_range(gl.constexpr(CUT.tiles)):
        pairs = (sums[tile] * factors[None, :]).reshape([ROWS // 16, 2, 8, BLOCK_M])
        gate, up = gl.split(pairs.permute(0, 2, 3, 1))
        product = (gate / (1.0 + gl.exp(-gate)) * up).reshape([ROWS // 2, BLOCK_M])
        out = gl.convert_layout(product.to(gl.bfloat16), HALF_OUT)
        row = (gl.program_id(0) * CUT.tiles + tile) * (ROWS // 2)
        row += gl.arange(0, ROWS // 2, gl.SliceLayout(1, HALF_OUT))
        token = gl.arange(0, BLOCK_M, gl.SliceLayout(0, HALF_OUT))
        inside = (row < INNER)[:, None] & (token < M)[None, :]
        gl.store(inner_ptr + token[None, :] * INNER + row[:, None], out, mask=inside)


@gluon.jit
def _store_qkv(sums, factors, bias_ptr, out_ptr, M, CUT: gl.constexpr, BLOCK_M: gl.constexpr, BIAS: gl.constexpr):
    N: gl.constexpr = CUT.rows
    for tile in gl.static_range(gl.constexpr(CUT.tiles)):
        out = gl.convert_layout(sums[tile] * factors[None, :], OUT)
        row = (gl.program_id(0) * CUT.tiles + tile) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
        token = gl.arange(0, BLOCK_M, gl.SliceLayout(0, OUT))
        if BIAS:
            out += gl.load(bias_ptr + row, mask=row < N, other=0.0).to(gl.float32)[:, None]
        inside = (row < N)[:, None] & (token < M)[None, :]
        gl.store(out_ptr + token[None, :] * N + row[:, None], out.to(gl.bfloat16), mask=inside)


@gluon.jit
def _compute_all(
    attended_desc, weighted_desc, inner_desc, hidden_ptr, middle_ptr, out_ptr, qkv_ptr, norm_ptr, next_norm_ptr,
    bias_ptr, scratch, ring, M, eps, CUTS: gl.constexpr, ALL_TILES: gl.constexpr, BLOCK_M: gl.constexpr,
    SLOTS: gl.constexpr, STAGES: gl.constexpr, BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    O: gl.constexpr = gl.constexpr(CUTS.o)
    GATE_UP: gl.constexpr = gl.constexpr(CUTS.gate_up)
    DOWN: gl.constexpr = gl.constexpr(CUTS.down)
    QKV: gl.constexpr = gl.constexpr(CUTS.qkv)
    PROGRAMS: gl.constexpr = CUTS.programs
    program = gl.program_id(0)
    item = program * 0
    turn = program * 0
    if PDL:
        gdc_wait()
    _fence()
    if program < O.programs:
        sums, item, turn = multiply(attended_desc, item, turn, ring, O, BLOCK_M, SLOTS, STAGES)
        _add_to_hidden(sums, hidden_ptr, middle_ptr, norm_ptr, scratch, M, O, BLOCK_M)
    _meet(scratch.meetings, PROGRAMS)
    if program < GATE_UP.programs:
        factors = _norm_factors(scratch.squares, eps, O.rows, ALL_TILES, BLOCK_M)
        sums, item, turn = multiply(weighted_desc, item, turn, ring, GATE_UP, BLOCK_M, SLOTS, STAGES)
        _store_swiglu(sums, factors, scratch.inner, M, GATE_UP, BLOCK_M)
    _meet(scratch.meetings, PROGRAMS)
    if program < DOWN.programs:
        sums, item, turn = multiply(inner_desc, item, turn, ring, DOWN, BLOCK_M, SLOTS, STAGES)
        _add_to_hidden(sums, middle_ptr, out_ptr, next_norm_ptr, scratch, M, DOWN, BLOCK_M)
    _meet(scratch.meetings, PROGRAMS)
    if program < QKV.programs:
        factors = _norm_factors(scratch.squares, eps, O.rows, ALL_TILES, BLOCK_M)
        sums, item, turn = multiply(weighted_desc, item, turn, ring, QKV, BLOCK_M, SLOTS, STAGES)
        _store_qkv(sums, factors, bias_ptr, qkv_ptr, M, QKV, BLOCK_M, BIAS)


@gluon.jit(do_not_specialize=["M"])
def _persistent_kernel(
    attended_desc,  # [M, Q]
    hidden_ptr,  # [M, H]
    middle_ptr,  # [M, H]: after the output projection
    out_ptr,  # [M, H]: after the layer
    qkv_ptr,  # [M, features of QKV]
    norm_ptr,  # [H]
    next_norm_ptr,  # [H]
    bias_ptr,  # [features of QKV]
    weighted_ptr,  # as in Scratch, to the last
    weighted_desc,
    squares_ptr,
    inner_ptr,
    inner_desc,
    partial_ptr,
    counters_ptr,
    meetings_ptr,
    o_desc,
    gate_up_desc,
    down_desc,
    qkv_desc,
    M,
    eps,
    CUTS: gl.constexpr,
    ALL_TILES: gl.constexpr,  # at least those of H
    BLOCK_M: gl.constexpr,
    SLOTS: gl.constexpr,
    STAGES: gl.constexpr,
    BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    ring = make_ring(SLOTS, STAGES, BLOCK_M)
    scratch = Scratch(weighted_ptr, squares_ptr, inner_ptr, partial_ptr, counters_ptr, meetings_ptr)
    gl.warp_specialize(
        [
            (_compute_all, (
                attended_desc, weighted_desc, inner_desc, hidden_ptr, middle_ptr, out_ptr, qkv_ptr, norm_ptr,
                next_norm_ptr, bias_ptr, scratch, ring, M, eps, CUTS, ALL_TILES, BLOCK_M, SLOTS, STAGES, BIAS, PDL,
            )),
            (_fetch_all, (o_desc, gate_up_desc, down_desc, qkv_desc, ring, CUTS, SLOTS)),
        ],
        [1],
        [40],
    )  # fmt: skip


@cache
def _counters(device: torch.device, programs: int) -> tuple[Tensor, Tensor]:
    """Of splits and of meetings, for all launches of so many programs on a device, which one stream keeps apart."""
    assert not torch.cuda.is_current_stream_capturing()  # a graph would set them to zero at every replay
    return torch.zeros(programs, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int64, device=device)


def _tiles(x: Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, [rows, TILE_WIDTH], TILE.value)


def _paired_tiles(gate_up: Tensor) -> TensorDescriptor:
    """The gate rows 8 i to 8 i + 7, then their up rows, for each i: [I / 8, 2, 8, H]."""
    half, width = gate_up.shape[0] // 2, gate_up.shape[1]
    shape, strides = [half // 8, 2, 8, width], [8 * width, half * width, width, 1]
    return TensorDescriptor(gate_up, shape, strides, [TILE_ROWS // 16, 2, 8, TILE_WIDTH], PAIRS.value)


@cache
def _cores(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def chosen_cuts(tokens: int, products: LayerProducts) -> LayerCuts | None:
    """How to share out the weights; None where other kernels are faster (H200, decision 057), or it cannot run."""
    weight = products.o
    if not (MIN_TOKENS <= tokens <= MAX_TOKENS and weight.dtype == torch.bfloat16 and is_hopper(weight.device)):
        return None
    hidden, attended = weight.shape
    inner, qkv = products.down.shape[1], products.next_qkv.shape[0]
    if hidden * (attended + 3 * inner + qkv) < MIN_WEIGHTS:
        return None
    return layer_cuts(hidden, attended, inner, qkv, _cores(weight.device))


def persistent_layer(
    attended: Tensor, hidden: Tensor, products: LayerProducts, cuts: LayerCuts
) -> tuple[Tensor, Tensor]:
    """attended [M, Q], hidden [M, H] bfloat16, M <= MAX_TOKENS -> the layer's hidden state [M, H], and qkv [M, N].

    Launches on one device must be on one stream: they share counters, and each needs nearly all of the device's cores.
    """
    tokens, width = hidden.shape
    assert tokens <= MAX_TOKENS, hidden.shape
    assert width == cuts.o.rows, (hidden.shape, cuts)
    assert hidden.is_contiguous()
    assert hidden.dtype == attended.dtype == torch.bfloat16
    assert products.gate_up.is_contiguous()
    block = next(size for size in SLOTS if tokens <= size)

    def new(*shape: int, dtype: torch.dtype = hidden.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=hidden.device)

    out, qkv = new(tokens, width), new(tokens, cuts.qkv.rows)
    weighted, inner = new(block, width), new(block, products.down.shape[1])
    tiles = max(cut.programs // cut.splits * cut.tiles for cut in (cuts.o, cuts.down))  # with those beyond the last row
    parts = max(cut.programs * cut.tiles for cut in (cuts.o, cuts.down))
    _persistent_kernel[(cuts.programs,)](
        _tiles(attended, block),
        hidden,
        new(tokens, width),
        out,
        qkv,
        products.norm,
        products.next_norm,
        products.next_qkv_bias,
        weighted,
        _tiles(weighted, block),
        new(tiles, block, dtype=torch.float32),
        inner,
        _tiles(inner, block),
        new(parts * TILE_ROWS, block, dtype=torch.float32),
        *_counters(hidden.device, cuts.programs),
        _tiles(products.o, TILE_ROWS),
        _paired_tiles(products.gate_up),
        _tiles(products.down, TILE_ROWS),
        _tiles(products.next_qkv, TILE_ROWS),
        tokens,
        products.eps,
        CUTS=cuts,
        ALL_TILES=triton.next_power_of_2(triton.cdiv(width, TILE_ROWS)),
        BLOCK_M=block,
        SLOTS=SLOTS[block],
        STAGES=STAGES[block],
        BIAS=products.next_qkv_bias is not None,
        num_warps=4,
        launch_cooperative_grid=True,  # all programs run at the same time or none does: they wait for each other
        **pdl_options(hidden),
    )
    return out, qkv

"""From an EngineConfig and a model's shape to a running data plane: every decision that depends on the machine."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from nanoinfer.attention.base import AttentionBackend
from nanoinfer.attention.numba import NumbaAttention
from nanoinfer.attention.torch import TorchAttention
from nanoinfer.config import EngineConfig
from nanoinfer.engine.info import EngineInfo
from nanoinfer.errors import ConfigError
from nanoinfer.kernels import numba_set
from nanoinfer.kernels.cpu_set import CpuKernels
from nanoinfer.kernels.heads import HeadLayout, KVCache
from nanoinfer.kernels.kernel_set import EAGER, KernelSet
from nanoinfer.kernels.numba_set import NumbaKernels
from nanoinfer.layers.group import ALONE, Group
from nanoinfer.layers.rotary import rotary_table
from nanoinfer.models.config import DTYPE_BYTES, ModelConfig
from nanoinfer.models.decoder import Decoder
from nanoinfer.models.weights import WeightSlot
from nanoinfer.runner import memory
from nanoinfer.runner.compile_ahead import KernelCompilation
from nanoinfer.runner.compile_numba import NumbaCompilation
from nanoinfer.runner.executor import Runner
from nanoinfer.runner.model_runner import ModelRunner, allocate_kv_caches
from nanoinfer.runner.overlapped_runner import OverlappedRunner
from nanoinfer.runner.worst_step import MemoryMark, graph_reserve, measured_kv_budget, run_worst_step

LoadWeights = Callable[[Mapping[str, WeightSlot]], None]


@dataclass(frozen=True)
class DataPlane:
    """A runner and what was decided on the way to it.

    `max_model_len` is the model's limit in tokens, or a lower one that was asked for; the pool may hold fewer.
    """

    runner: Runner
    overlap: bool  # whether a step may be submitted before the last one's result is known
    geometry: memory.KVGeometry
    device: torch.device
    dtype: str
    attention: str
    attention_reason: str
    kernels: str
    weight_bytes: int
    max_model_len: int
    warnings: tuple[str, ...]

    def info(self, config: EngineConfig, model_config: ModelConfig, *, model: str, model_reason: str) -> EngineInfo:
        return EngineInfo(
            model=model,
            model_reason=model_reason,
            architecture=model_config.architecture,
            device=str(self.device),
            dtype=self.dtype,
            attention=self.attention,
            attention_reason=self.attention_reason,
            kernels=self.kernels,
            tensor_parallel_size=config.tensor_parallel_size,
            block_size=self.geometry.block_size,
            num_blocks=self.geometry.num_blocks,
            kv_bytes=self.geometry.total_bytes,
            weight_bytes=self.weight_bytes,
            vocab_size=model_config.vocab_size,
            max_model_len=min(self.max_model_len, self.geometry.capacity),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            schedule=config.schedule,
            enable_prefix_caching=config.enable_prefix_caching,
            warnings=self.warnings,
        )


def resolve_device(choice: str) -> torch.device:
    """The device for --device; ConfigError if it is not there."""
    if choice == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(choice)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            have = "torch sees no CUDA device" if torch.version.cuda else "this torch is built without CUDA"
            if count:
                have = f"torch sees cuda:0 to cuda:{count - 1}" if count > 1 else "torch sees cuda:0 only"
            raise ConfigError(f"device '{choice}' is not there: {have}; use --device cpu or auto.")
    return device


def resolve_dtype(choice: str, device: torch.device) -> str:
    """auto: float32 on a CPU, where it is exact and fastest; bfloat16 on a GPU."""
    if choice != "auto":
        return choice
    return "float32" if device.type == "cpu" else "bfloat16"


def build_data_plane(
    config: EngineConfig,
    model_config: ModelConfig,
    device: torch.device,
    *,
    load: LoadWeights,
    group: Group = ALONE,
    start: MemoryMark | None = None,
    on_wait: Callable[[str], None] | None = None,
) -> DataPlane:
    """Decide dtype, back ends and pool, check that all fits, then build the model and fill it through `load`.

    All ranks of `group` must do so at the same time; each builds its part of the model, and the same pool of blocks.
    ConfigError, MemoryBudgetError: before any weight is read, unless only the GPU's profiling run can tell.
    A CUDA device becomes the current one: kernels are launched on that. `on_wait(what)` hears of a long wait. `start`
    is from before the group took memory of its own, which counts like all that this engine has on the device.
    """
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)
    dtype_name = resolve_dtype(config.dtype, device)
    dtype = getattr(torch, dtype_name)
    max_model_len, warnings = _model_len(config, model_config)
    kernels, attention_name, attention_reason = choose_back_ends(config, device, dtype)
    if attention_name == "flash-attn":
        _refuse_flash_attn(config, model_config, device, dtype)
    plan = PoolPlan(config, model_config, dtype_name, max_model_len, memory.DEFAULT_BLOCK_SIZES[attention_name], group)
    start = start or MemoryMark.now(device)
    geometry = plan.geometry_before_load(device)

    model = Decoder(model_config, kernels=kernels, dtype=dtype, device=device, group=group)
    heads = _head_layout(model_config, group)
    # A configuration may name a length that no pool can hold, and no table either.
    longest = min(max_model_len, geometry.capacity) if geometry else max_model_len
    cos_sin = rotary_table(model_config.rope, heads.head_dim, longest, device)
    attention = make_attention(attention_name, heads, cos_sin, kernels, config.max_num_seqs)
    compilation = None
    if device.type == "cuda" and group.size == 1:  # exchanges between ranks need one order, which threads have not
        compilation = KernelCompilation(model, attention, plan.allocate(1, device)[0])
    numba_compilation = NumbaCompilation(kernels, required=config.kernels == "numba")
    load(model.weight_slots())
    if reason := numba_compilation.wait(on_wait):
        attention, attention_reason = TorchAttention(heads, cos_sin, kernels), reason
    if compilation:
        compilation.wait()
    if geometry is None:
        geometry = plan.geometry(_profile(config, plan, model, attention, start, device))
    if config.max_model_len is not None and geometry.capacity < max_model_len:
        warnings.append(f"the KV pool holds {geometry.capacity} tokens, fewer than max_model_len {max_model_len}.")
    runner = make_runner(
        model,
        attention,
        plan.allocate(geometry.num_blocks, device),
        config=config,
        max_model_len=min(max_model_len, geometry.capacity),
        device=device,
    )
    return DataPlane(
        runner=runner,
        overlap=isinstance(runner, OverlappedRunner),
        geometry=geometry,
        device=device,
        dtype=dtype_name,
        attention=attention.name,
        attention_reason=attention_reason,
        kernels=kernels.name,
        weight_bytes=model_config.weight_bytes(dtype_name, group.size),
        max_model_len=max_model_len,
        warnings=tuple(warnings),
    )


def _head_layout(model_config: ModelConfig, group: Group) -> HeadLayout:
    """The heads of one rank."""
    num_kv_heads, head_dim = model_config.kv_heads_per_rank(group.size), model_config.head_dim
    return HeadLayout(model_config.num_heads // group.size, num_kv_heads, head_dim, head_dim**-0.5)


def _model_len(config: EngineConfig, model_config: ModelConfig) -> tuple[int, list[str]]:
    """The longest sequence in tokens, and a warning if the user asked for more than the model has."""
    limit = model_config.max_position_embeddings
    if config.max_model_len is None or config.max_model_len <= limit:
        return min(limit, config.max_model_len or limit), []
    return limit, [f"max_model_len {config.max_model_len} is beyond this model's {limit} tokens; using that."]


def choose_back_ends(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> tuple[KernelSet, str, str]:
    """(kernel set, attention back end, why); ConfigError if what was asked for cannot run here."""
    has_triton = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    if config.kernels in ("cpu", "numba") and device.type != "cpu":
        raise ConfigError(f"--kernels {config.kernels} is for CPUs, and the device is {device}; use auto.")
    for option, choice in (("attention", config.attention), ("kernels", config.kernels)):
        if choice == "triton" and not has_triton:
            raise ConfigError(f"--{option} triton needs a CUDA device and the triton package; use auto.")
    kernels: KernelSet = EAGER
    if config.kernels == "triton" or (config.kernels == "auto" and has_triton):
        from nanoinfer.kernels.triton_set import TritonKernels

        kernels = TritonKernels()
    elif config.kernels == "compiled":
        kernels = _compiled_kernels(device)
    elif device.type == "cpu" and config.kernels in ("auto", "cpu", "numba"):
        kernels = _cpu_kernels(config.kernels, dtype)
    if config.attention != "auto":
        return kernels, config.attention, "asked for"
    if has_triton:
        return kernels, "triton", "this device has Triton"
    if isinstance(kernels, NumbaKernels):
        return kernels, "numba", "numba is installed"
    if device.type == "cpu" and config.kernels == "auto":
        return kernels, "torch", str(numba_set.why_not(dtype))
    return kernels, "torch", f"the one for {device.type}"


def _cpu_kernels(choice: str, dtype: torch.dtype) -> CpuKernels:
    reason = numba_set.why_not(dtype)
    if reason and choice == "numba":
        raise ConfigError(f"--kernels numba cannot run here: {reason}; change that, or use auto.")
    return CpuKernels(dtype) if reason or choice == "cpu" else NumbaKernels(dtype)


def _compiled_kernels(device: torch.device) -> KernelSet:
    from nanoinfer.kernels import compiled_set

    if reason := compiled_set.why_not(device):
        raise ConfigError(f"--kernels compiled cannot run here: {reason}; install one, or use auto.")
    return compiled_set.CompiledKernels()


def _refuse_flash_attn(
    config: EngineConfig, model_config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> None:
    from nanoinfer.attention import flash

    block_size = config.block_size or memory.DEFAULT_BLOCK_SIZES["flash-attn"]
    if reason := flash.why_not(device, dtype, model_config.head_dim, block_size):
        raise ConfigError(f"--attention flash-attn cannot run here: {reason}; change that, or use --attention auto.")


def make_attention(
    name: str, heads: HeadLayout, cos_sin: torch.Tensor, kernels: KernelSet, max_num_seqs: int
) -> AttentionBackend:
    if name == "triton":
        from nanoinfer.attention.triton import TritonAttention

        return TritonAttention(heads, cos_sin, kernels, max_num_seqs)
    if name == "flash-attn":
        from nanoinfer.attention.flash import FlashAttention

        return FlashAttention(heads, cos_sin, kernels)
    if name == "numba":
        assert isinstance(kernels, NumbaKernels), kernels
        return NumbaAttention(heads, cos_sin, kernels)
    assert name == "torch", name
    return TorchAttention(heads, cos_sin, kernels)


@dataclass(frozen=True)
class PoolPlan:
    """What determines the KV pool's shape before its size is known."""

    config: EngineConfig
    model_config: ModelConfig
    dtype: str
    max_model_len: int
    default_block_size: int
    group: Group = ALONE

    @property
    def block_size(self) -> int:
        return self.config.block_size or self.default_block_size

    @property
    def bytes_per_token(self) -> int:
        return self.model_config.kv_bytes_per_token(DTYPE_BYTES[self.dtype], self.group.size)

    @property
    def smallest_bytes(self) -> int:
        return 2 * self.block_size * self.bytes_per_token

    def geometry_before_load(self, device: torch.device) -> memory.KVGeometry | None:
        """The pool where its size is known without a profiling run.

        MemoryBudgetError if the model and the pool, or the smallest one, do not fit.
        """
        geometry = None
        if device.type == "cuda":
            available = torch.cuda.mem_get_info(device)[0]
            if self.config.num_blocks is not None or self.config.kv_memory is not None:
                geometry = self.geometry(budget=0)  # which is not asked for
        else:
            sharers = self.group.ranks_on_host  # a CPU's memory is one for all of them
            available = memory.available_memory() // sharers
            geometry = self.geometry(memory.cpu_kv_budget(memory.usable_memory()) // sharers)
        kv_bytes = self.smallest_bytes if geometry is None else geometry.total_bytes
        memory.require_memory(self.model_config, self.dtype, kv_bytes, available, str(device), self.group.size)
        return geometry

    def geometry(self, budget: int) -> memory.KVGeometry:
        """The pool for the least of all ranks' budgets: they all have the same blocks."""
        budget = self.group.all_reduce_min(budget)
        return memory.plan_kv_pool(
            bytes_per_token=self.bytes_per_token,
            block_size=self.block_size,
            budget=budget if self.config.kv_memory is None else self.config.kv_memory,
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=self.max_model_len,
            num_blocks=self.config.num_blocks,
            is_budget_given=self.config.kv_memory is not None,
        )

    def allocate(self, num_blocks: int, device: torch.device) -> list[KVCache]:
        config, dtype = self.model_config, getattr(torch, self.dtype)
        return allocate_kv_caches(
            config.num_layers,
            num_blocks,
            self.block_size,
            config.kv_heads_per_rank(self.group.size),
            config.head_dim,
            dtype,
            device,
        )


def _profile(
    config: EngineConfig,
    plan: PoolPlan,
    model: Decoder,
    attention: AttentionBackend,
    start: MemoryMark,
    device: torch.device,
) -> int:
    """The KV budget in bytes, found by running the worst step once."""
    run_worst_step(
        model,
        attention,
        plan.allocate(1, device),
        num_tokens=config.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        max_num_seqs=config.max_num_seqs,
        device=device,
    )
    reserve = graph_reserve(plan.model_config, config.max_num_seqs, config.max_num_batched_tokens)
    return measured_kv_budget(start, config.gpu_memory_utilization, reserve, device)


def can_graph(config: EngineConfig, attention: AttentionBackend, kernels: KernelSet) -> bool:
    """Whether steps may become CUDA graphs: nothing in them may wait for the device."""
    return attention.reads_device_only and kernels.reads_device_only and not config.enforce_eager


def make_runner(
    model: Decoder,
    attention: AttentionBackend,
    kv_caches: list[KVCache],
    *,
    config: EngineConfig,
    max_model_len: int,
    device: torch.device,
) -> Runner:
    """The plain runner on a CPU, where a step cannot run beside Python anyway; the overlapped one on a GPU."""
    if device.type == "cpu":
        return ModelRunner(
            model,
            attention,
            kv_caches,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            device=device,
        )
    return OverlappedRunner(
        model,
        attention,
        kv_caches,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        device=device,
        use_graphs=can_graph(config, attention, model.kernels),
    )

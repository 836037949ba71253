"""From an EngineConfig and a model's shape to a running data plane: every decision that depends on the machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from nanoinfer.attention.base import AttentionBackend, HeadLayout, KVCache
from nanoinfer.attention.torch import TorchAttention
from nanoinfer.config import EngineConfig
from nanoinfer.engine.batch import Executor
from nanoinfer.engine.info import EngineInfo
from nanoinfer.errors import ConfigError
from nanoinfer.kernels.kernel_set import EAGER
from nanoinfer.layers.rotary import rotary_table
from nanoinfer.models.config import DTYPE_BYTES, ModelConfig
from nanoinfer.models.decoder import Decoder
from nanoinfer.models.registry import build_model
from nanoinfer.models.weights import WeightSlot
from nanoinfer.runner import memory
from nanoinfer.runner.executor import LocalExecutor, Runner
from nanoinfer.runner.model_runner import ModelRunner, allocate_kv_caches
from nanoinfer.runner.overlapped_runner import OverlappedRunner

DEFAULT_BLOCK_SIZE = 16

LoadWeights = Callable[[Mapping[str, WeightSlot]], None]


@dataclass(frozen=True)
class DataPlane:
    """An executor and what was decided on the way to it. `max_model_len` is the model's own limit, in tokens."""

    executor: Executor
    overlap: bool  # whether a step may be submitted before the last one's result is known
    pool: memory.KVGeometry
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
            block_size=self.pool.block_size,
            num_blocks=self.pool.num_blocks,
            kv_bytes=self.pool.total_bytes,
            weight_bytes=self.weight_bytes,
            vocab_size=model_config.vocab_size,
            max_model_len=min(self.max_model_len, self.pool.capacity),
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
            have = f"torch sees {count} CUDA devices" if count else "torch sees no CUDA device"
            raise ConfigError(f"device '{choice}' is not there: {have}; use --device cpu or auto.")
    return device


def resolve_dtype(choice: str, device: torch.device) -> str:
    """auto: float32 on a CPU, where it is exact and fastest; bfloat16 on a GPU."""
    if choice != "auto":
        return choice
    return "float32" if device.type == "cpu" else "bfloat16"


def build_data_plane(
    config: EngineConfig, model_config: ModelConfig, device: torch.device, *, load: LoadWeights
) -> DataPlane:
    """Decide dtype, pool and back ends, check that they fit, then build the model and fill it through `load`.

    ConfigError, MemoryBudgetError: before any weight is read.
    """
    _refuse_unavailable(config)
    warnings = []
    dtype = resolve_dtype(config.dtype, device)
    max_model_len = model_config.max_position_embeddings
    if config.max_model_len is not None:
        if config.max_model_len > max_model_len:
            warnings.append(
                f"max_model_len {config.max_model_len} is beyond this model's {max_model_len} tokens; using that."
            )
        max_model_len = min(max_model_len, config.max_model_len)
    pool = _plan_pool(config, model_config, dtype, max_model_len)
    if config.max_model_len is not None and pool.capacity < max_model_len:
        warnings.append(f"the KV pool holds {pool.capacity} tokens, fewer than max_model_len {max_model_len}.")
    memory.require_memory(model_config, dtype, pool.total_bytes, memory.available_memory(), str(device))

    model = build_model(
        model_config,
        kernels=EAGER,
        dtype=getattr(torch, dtype),
        device=device,
    )
    load(model.weight_slots())
    kv_caches = allocate_kv_caches(
        model_config.num_layers,
        pool.num_blocks,
        pool.block_size,
        model_config.num_kv_heads,
        model_config.head_dim,
        getattr(torch, dtype),
        device,
    )
    heads = HeadLayout(
        model_config.num_heads, model_config.num_kv_heads, model_config.head_dim, model_config.head_dim**-0.5
    )
    num_positions = min(max_model_len, pool.capacity)
    cos_sin = rotary_table(model_config.rope, model_config.head_dim, num_positions, device)
    attention = TorchAttention(heads, cos_sin, EAGER)
    runner = make_runner(model, attention, kv_caches, config=config, max_model_len=num_positions, device=device)
    return DataPlane(
        executor=LocalExecutor(runner),
        overlap=isinstance(runner, OverlappedRunner),
        pool=pool,
        device=device,
        dtype=dtype,
        attention=attention.name,
        attention_reason="asked for" if config.attention == "torch" else f"the one for {device.type}",
        kernels=EAGER.name,
        weight_bytes=model_config.weight_bytes(dtype),
        max_model_len=max_model_len,
        warnings=tuple(warnings),
    )


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
        max_model_len=max_model_len,
        device=device,
        use_graphs=not config.enforce_eager,
    )


def _plan_pool(config: EngineConfig, model_config: ModelConfig, dtype: str, max_model_len: int) -> memory.KVGeometry:
    budget = config.kv_memory
    if budget is None:
        budget = memory.cpu_kv_budget(memory.usable_memory())
    return memory.plan_kv_pool(
        bytes_per_token=model_config.kv_bytes_per_token(DTYPE_BYTES[dtype]),
        block_size=config.block_size or DEFAULT_BLOCK_SIZE,
        budget=budget,
        max_tokens_in_use=config.max_num_seqs * max_model_len,
        num_blocks=config.num_blocks,
    )


def _refuse_unavailable(config: EngineConfig) -> None:
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, but this version runs on one device; use 1."
        )
    if config.attention not in ("auto", "torch"):
        raise ConfigError(f"attention back end '{config.attention}' is not in this version; use auto or torch.")
    if config.kernels not in ("auto", "eager"):
        raise ConfigError(f"kernel set '{config.kernels}' is not in this version; use auto or eager.")

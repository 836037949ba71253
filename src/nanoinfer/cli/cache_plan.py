"""How many tokens and sequences fit: the memory of one rank as arithmetic, from a model's config.json alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nanoinfer.cli.command import OK
from nanoinfer.cli.session import Session
from nanoinfer.config import EngineConfig
from nanoinfer.errors import MemoryBudgetError
from nanoinfer.models.config import DTYPE_BYTES, ModelConfig
from nanoinfer.models.partition import check_splits
from nanoinfer.runner.memory import DEFAULT_BLOCK_SIZES
from nanoinfer.ui.text import byte_size

# A round figure for the CUDA context, NCCL buffers, the allocator's rounding and the captured graphs.
OVERHEAD_ESTIMATE = 1_500 * 1024 * 1024
CPU_OVERHEAD_ESTIMATE = 400 * 1024 * 1024  # torch, numba and the interpreter; benchmarks/memory_cpu.py measures it


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes are of one rank. Weights and KV are exact; activations and overhead are estimates."""

    dtype: str
    tp: int
    memory: int
    usable: int
    weights: int
    activations: int
    overhead: int
    kv_bytes_per_token: int
    block_size: int
    num_blocks: int
    max_model_len: int

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.block_size * self.kv_bytes_per_token

    @property
    def tokens(self) -> int:
        """Tokens that the pool holds, over all sequences."""
        return self.num_blocks * self.block_size

    def sequences(self, length: int) -> int:
        """How many sequences of `length` tokens fit at the same time, each in whole blocks."""
        return self.num_blocks // -(-length // self.block_size)


def plan_memory(model: ModelConfig, config: EngineConfig, memory: int) -> MemoryPlan:
    """The plan for `memory` bytes on each rank. ConfigError if the model cannot be split, MemoryBudgetError with the
    whole budget if nothing is left for KV."""
    tp = config.tensor_parallel_size
    check_splits(model, tp)
    dtype = config.dtype if config.dtype != "auto" else model.dtype or "bfloat16"
    width = DTYPE_BYTES[dtype]
    per_token = model.kv_bytes_per_token(width, tp)
    block_size = config.block_size or DEFAULT_BLOCK_SIZES[_attention(config)]
    usable = int(memory * config.gpu_memory_utilization)
    weights = model.weight_bytes(dtype, tp)
    activations = activation_estimate(model, config, width)
    overhead = CPU_OVERHEAD_ESTIMATE if config.device == "cpu" else OVERHEAD_ESTIMATE
    left = usable - weights - activations - overhead
    num_blocks = max(left, 0) // (per_token * block_size)
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
    if num_blocks < 1:
        raise MemoryBudgetError(
            f"nothing is left for the KV cache: {byte_size(usable)} usable of {byte_size(memory)}, weights "
            f"{byte_size(weights)}, activations about {byte_size(activations)}, overhead about "
            f"{byte_size(overhead)}. Use more memory, a larger --tp or a smaller model"
            + ("." if config.device == "cpu" else "; --device cpu plans for a CPU.")
        )
    limit = min(model.max_position_embeddings, config.max_model_len or model.max_position_embeddings)
    return MemoryPlan(
        dtype, tp, memory, usable, weights, activations, overhead, per_token, block_size, num_blocks, limit
    )


def _attention(config: EngineConfig) -> str:
    """The back end that `auto` becomes where the plan's memory is a GPU's, which it is unless --device says cpu."""
    if config.attention != "auto":
        return config.attention
    return "torch" if config.device == "cpu" else "triton"


def activation_estimate(model: ModelConfig, config: EngineConfig, width: int) -> int:
    """Bytes of the largest step's live tensors: the widest layer's for every token, and the sampler's logits."""
    tp = config.tensor_parallel_size
    per_token = 4 * model.hidden_size + 3 * model.intermediate_size // tp
    per_token += (model.num_heads // tp + 2 * model.kv_heads_per_rank(tp)) * model.head_dim
    logits = config.max_num_seqs * model.vocab_size // tp * (width + 2 * 4)  # as computed, and twice in float32
    return config.max_num_batched_tokens * per_token * width + logits


def run_plan(session: Session, config: EngineConfig, memory: int) -> int:
    """`inspect-cache --plan`: print what fits `memory` bytes on each GPU; needs only the model's config.json."""
    from nanoinfer.cli.cache_plan_view import plan_as_document, plan_as_text
    from nanoinfer.loading.folder import read_json, read_model_config
    from nanoinfer.loading.resolve import resolve_model

    path = Path(config.model or "")
    if path.suffix == ".json":
        name, model = str(path), ModelConfig.from_dict(read_json(path), source=str(path))
    else:
        source = resolve_model(config.model, revision=config.revision, load_format="dummy", device_is_gpu=True)
        name, model = source.name, read_model_config(source.folder)
    result = plan_memory(model, config, memory)
    if session.display.json:
        session.show_json(plan_as_document(name, model, result))
    else:
        session.show(plan_as_text(name, model, result))
    return OK

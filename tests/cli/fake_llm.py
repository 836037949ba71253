"""A stand-in for nanoinfer.LLM: the real control plane on an executor whose answers are a function of the prompt.

Tokens are UTF-8 bytes, so that any text can be asked and answered; the answer is `reply(prompt text)`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nanoinfer.config import EngineConfig, SamplingParams
from nanoinfer.engine.batch import CompletedStep, ScheduledBatch, StepHandle, StepResult, TokenLogprobs
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.chat_template import check_messages
from nanoinfer.engine.detokenizer import IncrementalDetokenizer
from nanoinfer.engine.engine import LLMEngine
from nanoinfer.engine.info import DeviceLimits, EngineInfo
from nanoinfer.engine.outputs import OutputDelta, RequestOutput
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.errors import EngineError, RequestError
from nanoinfer.models.config import ModelConfig, RopeConfig

EOS, VOCAB = 256, 257

# A shape to do arithmetic with: 32 bytes of KV a token.
MODEL = ModelConfig(
    architecture="Fake", vocab_size=VOCAB, hidden_size=8, intermediate_size=16, num_layers=1, num_heads=4,
    num_kv_heads=2, head_dim=2, rms_norm_eps=1e-6, rope=RopeConfig(theta=1e4), max_position_embeddings=2048,
)  # fmt: skip

Reply = Callable[[str], str]


def shout(prompt: str) -> str:
    """The default answer: the last user message in capitals, or the raw prompt."""
    last = prompt.rpartition("<user>")[2]
    return re.sub(r"<thinking=\w+>|<assistant>", "", last).strip().upper()


@dataclass
class _Row:
    tokens: list[int]
    answer: list[int]
    prompt_len: int


class ScriptedExecutor:
    """Writes `reply(prompt)` and then EOS, byte by byte. `before_step` is called with the step's number."""

    def __init__(self, reply: Reply, before_step: Callable[[int], None]) -> None:
        self._reply = reply
        self._before_step = before_step
        self._rows: dict[int, _Row] = {}

    def submit(self, batch: ScheduledBatch) -> StepHandle:
        self._before_step(batch.step)
        for new in batch.new_sequences:
            prompt = bytes(token for token in new.token_ids[: new.prompt_len] if token < 256).decode(errors="replace")
            self._rows[new.row] = _Row(list(new.token_ids), list(self._reply(prompt).encode()), new.prompt_len)
        sampled = []
        for row, is_sampled in zip(batch.rows, batch.is_sampled, strict=True):
            if is_sampled:
                state = self._rows[row]
                written = len(state.tokens) - state.prompt_len
                sampled.append(state.answer[written] if written < len(state.answer) else EOS)
                state.tokens.append(sampled[-1])
        return CompletedStep(StepResult(sampled, [TokenLogprobs(t, -0.5, [(t, -0.5)]) for t in sampled], 0.1))

    def discard(self) -> None: ...

    def close(self) -> None:
        pass


class ByteTokenizer:
    """What the command line uses of a tokenizer."""

    def __init__(self, *, system_role: bool = True, chat_template: bool = True) -> None:
        self._system_role = system_role
        self.has_chat_template = chat_template

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token for token in token_ids if token < 256).decode(errors="replace")

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS

    @property
    def supports_system(self) -> bool:
        return self._system_role

    supports_thinking = True

    def encode_chat(self, messages: Any, **options: Any) -> tuple[str, list[int]]:
        if not self.has_chat_template:
            raise RequestError("this model has no chat template; use 'prompt'.", "no_chat_template")
        checked = check_messages(messages)
        if not self._system_role and checked[0]["role"] == "system":
            raise RequestError("this model's chat template takes no system message.")
        think = "" if "enable_thinking" not in options else f"<thinking={options['enable_thinking']}>"
        text = "".join(f"<{m['role']}>{m['content']}" for m in checked) + f"{think}<assistant>"
        return text, self.encode(text)


@dataclass
class FakeTrace:
    """What a StepTrace would have recorded, written as its number of steps."""

    path: Path
    skip: int
    count: int
    steps: int = 0
    closed: bool = False

    def close(self) -> int:
        self.closed = True
        recorded = min(max(self.steps - self.skip - 1, 0), self.count)
        if recorded:
            self.path.write_text(str(recorded))
        return recorded


class FakeLLM:
    """The interface of nanoinfer.llm.LLM that the commands use."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        reply: Reply = shout,
        before_step: Callable[[int], None] = lambda step: None,
        tokenizer: ByteTokenizer | None = None,
        has_tokenizer: bool = True,
        max_model_len: int = 2048,
    ) -> None:
        config = config or EngineConfig()
        self.config = config
        self.closed = False
        self.submitted: list[tuple[Any, SamplingParams, dict[str, Any]]] = []
        self.resets = 0
        self.traces: list[FakeTrace] = []
        self.tokenizer = (tokenizer or ByteTokenizer()) if has_tokenizer else None
        self.default_sampling = SamplingParams(temperature=0.6, top_p=0.95)
        block_size, num_blocks = config.block_size or 4, config.num_blocks or 1024
        max_model_len = min(config.max_model_len or max_model_len, num_blocks * block_size)
        scheduler = Scheduler(
            BlockManager(num_blocks, block_size, enable_prefix_caching=config.enable_prefix_caching),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            policy=config.schedule,
        )
        self.engine = LLMEngine(
            scheduler,
            ScriptedExecutor(reply, before_step),
            make_detokenizer=self._detokenizer if self.tokenizer else None,
            vocab_size=VOCAB,
            eos_token_ids=frozenset({EOS}),
            max_model_len=max_model_len,
            clock=time.perf_counter,
        )
        self.events = self.engine.events
        self.model_config = MODEL
        self.model_folder = Path("no-such-folder")
        self.info = EngineInfo(
            model="fake",
            model_reason="fake: chosen by the test",
            architecture="Fake",
            device="cpu",
            dtype="float32",
            attention="torch",
            attention_reason="the only one",
            kernels="eager",
            tensor_parallel_size=config.tensor_parallel_size,
            block_size=block_size,
            num_blocks=num_blocks,
            kv_bytes=num_blocks * block_size * 32,
            weight_bytes=1000,
            vocab_size=VOCAB,
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            schedule=config.schedule,
            enable_prefix_caching=config.enable_prefix_caching,
        )

    def _detokenizer(self, prompt: Any, stop: tuple[str, ...], min_tokens: int) -> IncrementalDetokenizer:
        assert self.tokenizer is not None
        return IncrementalDetokenizer(self.tokenizer.decode, prompt, stop=stop, min_tokens=min_tokens)

    def encode(self, prompt: Any, template_options: dict[str, Any] | None = None) -> tuple[str | None, list[int]]:
        if not isinstance(prompt, str) and all(isinstance(token, int) for token in prompt):
            return None, list(prompt)
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer; send token ids.", "no_tokenizer")
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        return self.tokenizer.encode_chat(prompt, **(template_options or {}))

    def submit(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        template_options: dict[str, Any] | None = None,
        stream: bool = False,
    ) -> str:
        sampling = sampling_params or self.default_sampling
        self.submitted.append((prompt, sampling, template_options or {}))
        text, ids = self.encode(prompt, template_options)
        name = request_id or f"request-{len(self.submitted)}"
        self.engine.add_request(name, ids, sampling, prompt=text, stream=stream)
        return name

    def step(self) -> list[OutputDelta]:
        for trace in self.traces:
            trace.steps += not trace.closed
        return self.engine.step()

    @property
    def has_unfinished(self) -> bool:
        return self.engine.has_unfinished

    def abort(self, request_id: str) -> RequestOutput | None:
        return self.engine.abort(request_id)

    def cache_snapshot(self) -> Any:
        return replace(self.engine.cache_snapshot(), engine=asdict(self.info))

    def check_integrity(self) -> list[str]:
        return self.engine.check_integrity()

    def reset_prefix_cache(self) -> None:
        self.resets += 1
        self.engine.reset_prefix_cache()

    def trace_steps(self, path: Path, *, skip: int, count: int) -> FakeTrace:
        self.traces.append(FakeTrace(path, skip, count))
        return self.traces[-1]

    def measure_device(self) -> DeviceLimits:
        return DeviceLimits(name="Fake CPU", memory_bytes=1 << 30, threads=2, copy_bytes_per_s=1e9, flops_per_s=1e10)

    def close(self) -> None:
        self.closed = True


def die_at(step: int, error: BaseException | None = None) -> Callable[[int], None]:
    """A `before_step` that raises at that step."""

    def before_step(number: int) -> None:
        if number == step:
            raise error or EngineError("the device went away.")

    return before_step

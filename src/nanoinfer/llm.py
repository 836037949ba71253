"""LLM: the Python API. Ties the model's files, the tokenizer, the engine and the data plane together."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from nanoinfer.config import DEFAULT_MAX_TOKENS, EngineConfig, SamplingParams
from nanoinfer.data_plane import open_data_plane
from nanoinfer.engine.outputs import OutputDelta, RequestOutput
from nanoinfer.errors import ConfigError, EngineError, RequestError
from nanoinfer.prompt import Prompt, as_list, checked, is_token_ids

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from nanoinfer.engine.cache_snapshot import CacheSnapshot
    from nanoinfer.engine.events import EventStream
    from nanoinfer.engine.info import DeviceLimits
    from nanoinfer.engine.tokenizer import Tokenizer
    from nanoinfer.loading import Notify
    from nanoinfer.runner.step_trace import StepTrace

# The fields of generation_config.json that are a model's own sampling defaults.
_SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class LLM:
    """A model ready to generate. `options` are the fields of EngineConfig, the long names of the command line; `model`
    may also be an EngineConfig, which then says everything.

    A prompt is text (encoded as it is), token ids, or a conversation of {"role", "content"} messages (through the
    model's chat template). Raises ConfigError for an unknown option, ModelError and MemoryBudgetError before anything
    large is loaded. Use it as a context manager, or call `close()`.

    `info` has what the machine and the model decided, `model_config` the model's shapes, `model_folder` its files;
    `events` carries one StepEvent per step; `default_sampling` are the model's own sampling defaults.
    `notify(stage, done, total)` hears of download, import and load, in bytes.

    Several threads may call `generate` and `stream`, whose requests then run together; `step` gives everybody's deltas,
    so it is for programs that use nothing else.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | EngineConfig | None = None,
        *,
        notify: Notify | None = None,
        **options: Any,
    ) -> None:
        from nanoinfer.engine.block_manager import BlockManager
        from nanoinfer.engine.engine import LLMEngine
        from nanoinfer.engine.scheduler import Scheduler
        from nanoinfer.engine.tokenizer import Tokenizer, has_tokenizer
        from nanoinfer.engine.turns import Turns
        from nanoinfer.loading import silent
        from nanoinfer.loading.folder import read_generation_config, read_model_config
        from nanoinfer.loading.resolve import resolve_model
        from nanoinfer.runner.openmp import wait_briefly
        from nanoinfer.runner.wake_gpu import wake_gpu

        wait_briefly()
        config = _config_of(model, options)
        notify = notify or silent
        source = resolve_model(
            config.model,
            named=config.model_named,
            revision=config.revision,
            load_format=config.load_format,
            # Only which shape gets random weights depends on it: a wrong path is told before torch is imported.
            device_is_gpu=config.model is None and config.load_format == "dummy" and _device_of(config).type == "cuda",
            notify=notify,
        )
        wake_gpu(config.device)
        model_config = self.model_config = read_model_config(source.folder)
        self.tokenizer = Tokenizer.from_folder(source.folder) if has_tokenizer(source.folder) else None
        self.default_sampling = _default_sampling(read_generation_config(source.folder))
        plane, self._executor = open_data_plane(config, model_config, source.folder, notify)
        self.model_folder = source.folder
        self.info = plane.info(config, model_config, model=source.name, model_reason=source.reason)
        scheduler = Scheduler(
            BlockManager(
                plane.geometry.num_blocks, plane.geometry.block_size, enable_prefix_caching=config.enable_prefix_caching
            ),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_prefill_chunk=config.max_prefill_chunk,
            policy=config.schedule,
        )
        self._engine = LLMEngine(
            scheduler,
            self._executor,
            make_detokenizer=self.tokenizer.detokenizer if self.tokenizer is not None else None,
            vocab_size=model_config.vocab_size,
            eos_token_ids=_eos_token_ids(source.folder, self.tokenizer),
            max_model_len=plane.max_model_len,
            is_lowered=plane.max_model_len < model_config.max_position_embeddings,
            seed=config.seed,
            overlap=plane.overlap,
        )
        self._turns = Turns()  # of the threads that use the engine
        self._backlog: list[OutputDelta] = []  # deltas of requests that a call ran along with its own
        self._is_stepping = False
        self._dropped: list[str] = []  # requests to end after the step
        self._ids = count()
        self._trace: StepTrace | None = None
        self._closed = False
        self._process = os.getpid()

    # -- whole calls -----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Run one prompt or a list of them to the end; outputs come in the order of the prompts.

        `sampling_params` is one for all, one for each, or None for the model's defaults. Nothing runs if one of the
        prompts is refused (RequestError); an exception or interrupt leaves none of these requests behind.
        """
        prompts = as_list(prompts)
        params = self.default_sampling if sampling_params is None else sampling_params
        if not isinstance(params, Sequence):
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            raise ConfigError(f"prompts: {len(prompts)}, sampling parameters: {len(params)}; give one or one for each.")
        request_ids: list[str] = []
        done: dict[str, RequestOutput] = {}
        try:
            for prompt, param in zip(prompts, params, strict=True):
                request_ids.append(self._new_id())  # before the request exists: an interrupt must not orphan it
                self.submit(prompt, param, request_id=request_ids[-1], template_options=template_options)
            own = set(request_ids)
            while len(done) < len(own):
                with self._turns:
                    deltas = self._take(own)
                    if not deltas and not self._engine.has_unfinished:
                        raise EngineError("a request was ended, or its output taken, by another call of this LLM.")
                done |= {delta.request_id: delta.output for delta in deltas if delta.output is not None}
        finally:
            for request_id in request_ids:
                if request_id not in done:
                    self.abort(request_id)
        return [done[request_id] for request_id in request_ids]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        template_options: Mapping[str, Any] | None = None,
    ) -> TokenStream:
        """Run one prompt and iterate over its text and tokens as they come; leaving or closing it ends the request."""
        if isinstance(prompt, list | tuple) and any(isinstance(item, str) for item in prompt):
            raise RequestError("stream takes one prompt, not several; start a stream for each.")
        request_id = self.submit(prompt, sampling_params, template_options=template_options, stream=True)
        return TokenStream(self, request_id)

    def _take(self, own: set[str]) -> list[OutputDelta]:
        """The deltas of the requests in `own` that other calls have run along, or else those of one more step."""
        with self._turns:
            self._refuse_if_closed()
            if not any(delta.request_id in own for delta in self._backlog):
                self._backlog += self._run_step()
            mine = [delta for delta in self._backlog if delta.request_id in own]
            self._backlog = [delta for delta in self._backlog if delta.request_id not in own]
        return mine

    # -- step by step ----------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        stream: bool = False,
    ) -> str:
        """Queue a request and return its id; RequestError if it can never run. `step` works on it.

        With `stream`, `step` returns each new piece; without, only the finished output. `template_options` go to the
        chat template, such as enable_thinking.
        """
        self._refuse_if_closed()
        if request_id is None:
            request_id = self._new_id()
        text, token_ids = self.encode(prompt, template_options)
        sampling = self.default_sampling if sampling_params is None else sampling_params
        if not isinstance(sampling, SamplingParams):
            raise ConfigError(f"sampling_params is a {type(sampling).__name__}; write SamplingParams(temperature=0.7).")
        with self._turns:
            self._refuse_if_closed()
            self._engine.add_request(request_id, token_ids, sampling, prompt=text, stream=stream)
        return request_id

    def _refuse_if_closed(self) -> None:
        if os.getpid() != self._process:
            raise EngineError(
                f"this LLM belongs to process {self._process}, of which this one is a fork; make a new one in a "
                "process that is started afresh (multiprocessing's spawn)."
            )
        if self._closed:
            raise EngineError("this LLM is closed; make a new one.")

    def _new_id(self) -> str:
        return f"request-{next(self._ids)}"

    def step(self) -> list[OutputDelta]:
        """Run one engine step and return what became new since the last call."""
        with self._turns:
            if self._engine.has_unfinished:
                self._backlog += self._run_step()
            deltas, self._backlog = self._backlog, []
        return deltas

    def _run_step(self) -> list[OutputDelta]:
        self._is_stepping = True
        try:
            deltas = self._engine.step()
        finally:
            self._is_stepping = False
        if self._trace is not None:
            self._trace.step()
        while self._dropped:
            request_id = self._dropped.pop()
            deltas = [delta for delta in deltas if delta.request_id != request_id]
            self.abort(request_id)
        return deltas

    def _drop(self, request_id: str) -> None:
        """Abort a request whose stream is gone. The garbage collector may say so in the middle of a step."""
        if self._is_stepping:
            self._dropped.append(request_id)
        else:
            self.abort(request_id)

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do or to return."""
        return bool(self._backlog) or self._engine.has_unfinished

    def is_running(self, request_id: str) -> bool:
        """Whether more deltas of this request will come."""
        return self._engine.is_running(request_id) or any(d.request_id == request_id for d in self._backlog)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request and return what it has so far; None if it is not running. No delta of it comes any more."""
        with self._turns:
            self._backlog = [delta for delta in self._backlog if delta.request_id != request_id]
            return self._engine.abort(request_id)

    def encode(self, prompt: Prompt, template_options: Mapping[str, Any] | None = None) -> tuple[str | None, list[int]]:
        """The text that is encoded (None for token ids) and its token ids. RequestError as in `submit`."""
        prompt = checked(prompt)
        if not isinstance(prompt, str) and not is_token_ids(prompt):
            return self._needed_tokenizer().encode_chat(list(prompt), **(template_options or {}))
        if template_options:
            raise ConfigError("template_options belong to messages; this prompt does not go through a chat template.")
        if isinstance(prompt, str):
            return prompt, self._needed_tokenizer().encode(prompt)
        return None, list(prompt) if set(map(type, prompt)) == {int} else [int(token) for token in prompt]

    def _needed_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                f"{self.info.model} has no tokenizer; give the prompt as token ids, or add tokenizer.json.",
                "no_tokenizer",
            )
        return self.tokenizer

    # -- inspection ------------------------------------------------------------------------------------------------

    @property
    def events(self) -> EventStream:
        return self._engine.events

    def cache_snapshot(self) -> CacheSnapshot:
        """Every block of the KV pool and its content, as plain data."""
        with self._turns:
            return replace(self._engine.cache_snapshot(), engine=asdict(self.info))

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix that no running sequence uses."""
        with self._turns:
            self._engine.reset_prefix_cache()

    def check_integrity(self) -> list[str]:
        """Sentences for every broken invariant of the KV pool; an empty list if all is well."""
        with self._turns:
            return self._engine.check_integrity()

    def measure_device(self) -> DeviceLimits:
        """Measure what the first rank's device can do; takes about half a second, and the device should be idle."""
        from nanoinfer.runner.device_limits import measure_limits

        return measure_limits(self.info.device, self.info.dtype)

    def trace_steps(self, path: Path, *, skip: int = 0, count: int = 32) -> StepTrace:
        """Record every operation of `count` coming steps, after `skip` + 1 others; closing the trace writes `path`
        (.json or .json.gz), a Chrome trace. With tensor parallelism it is the first rank's. One trace at a time."""
        from nanoinfer.runner.step_trace import StepTrace

        self._trace = StepTrace(path, skip=skip, count=count)
        return self._trace

    def close(self) -> None:
        """End all requests and free the model and the KV pool. Closing twice is fine, and does nothing in a fork."""
        if os.getpid() != self._process:
            return  # the ranks and their channels are still in use
        with self._turns:
            if not self._closed:
                self._closed = True
                self._engine.abort_all()
                self._executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TokenStream:
    """Iterates over the OutputDeltas of one request. `close` ends the request, as does dropping the stream."""

    def __init__(self, llm: LLM, request_id: str) -> None:
        self.request_id = request_id
        self._llm = llm
        self._deltas: deque[OutputDelta] = deque()
        self._has_all = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> OutputDelta:
        try:
            while not self._deltas:
                if self._has_all or not (self._llm.is_running(self.request_id) or self._llm._closed):
                    raise StopIteration
                self._deltas.extend(self._llm._take({self.request_id}))
                self._has_all = any(delta.output is not None for delta in self._deltas)
        except BaseException:
            self.close()
            raise
        return self._deltas.popleft()

    def close(self) -> None:
        self._has_all = True
        self._llm.abort(self.request_id)

    def __del__(self) -> None:
        self._llm._drop(self.request_id)


def _config_of(model: str | os.PathLike[str] | EngineConfig | None, options: Mapping[str, Any]) -> EngineConfig:
    if not isinstance(model, EngineConfig):
        return EngineConfig.from_options({"model": model, **options})
    if options:
        raise ConfigError(f"an EngineConfig and options are both given ({', '.join(options)}); give one of them.")
    return model


def _device_of(config: EngineConfig) -> torch.device:
    from nanoinfer.runner.build import resolve_device

    return resolve_device(config.device)


def _eos_token_ids(folder: Path, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Every id that ends a sequence, whichever of the model's files names it: published ones disagree."""
    from nanoinfer.loading.folder import read_eos_token_ids

    return frozenset({*read_eos_token_ids(folder), *(tokenizer.eos_token_ids if tokenizer is not None else ())})


def _default_sampling(generation_config: Mapping[str, Any]) -> SamplingParams:
    options = {name: generation_config[name] for name in _SAMPLING_DEFAULTS if generation_config.get(name) is not None}
    if generation_config.get("do_sample") is False:
        options["temperature"] = 0.0
    try:
        return SamplingParams(max_tokens=DEFAULT_MAX_TOKENS, **options)
    except ConfigError as error:
        raise ConfigError(f"generation_config.json: {error}") from error

"""Scheduling step by step: budgets, chunks, both policies, preemption, refusals; each public bug by its symptom."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from engines import VOCAB, greedy, make_engine, run
from fake_executor import expected_tokens
from thoroughness import some

from nanoinfer.config import EngineConfig, SamplingParams
from nanoinfer.engine.batch import ScheduledBatch
from nanoinfer.engine.block_manager import PrefixMatch
from nanoinfer.engine.events import StepEvent
from nanoinfer.engine.sequence import Sequence
from nanoinfer.errors import ConfigError, RequestError


def shape(batch: ScheduledBatch) -> tuple[int, list[int]]:
    """(decodes, prefill chunk sizes) of a step."""
    return batch.num_decodes, batch.query_lens[batch.num_decodes :]


def test_mixed_steps_give_running_sequences_their_token_while_prompts_keep_arriving() -> None:
    """Prefill that always wins stalls every running answer."""
    engine, executor = make_engine(max_num_batched_tokens=9, policy="mixed")
    engine.add_request("a", [1, 2, 3], greedy(8))
    engine.step()
    for i in range(4):
        engine.add_request(f"p{i}", [i, i + 1, i + 2, i + 3], greedy(1))
        engine.step()
    assert all(batch.num_decodes >= 1 for batch in executor.batches[1:])


def test_prefill_first_steps_are_one_kind() -> None:
    engine, executor = make_engine(policy="prefill-first")
    engine.add_request("a", [1, 2, 3], greedy(4))
    engine.step()
    engine.add_request("b", [5, 6], greedy(4))
    engine.step()
    engine.step()
    assert [shape(batch) for batch in executor.batches] == [(0, [3]), (0, [2]), (2, [])]


def test_a_prompt_that_is_not_the_first_is_chunked_into_the_remaining_budget() -> None:
    engine, executor = make_engine(max_num_batched_tokens=16)
    engine.add_request("a", [1] * 10, greedy(2))
    engine.add_request("b", [2] * 10, greedy(2))
    run(engine)
    assert [shape(batch) for batch in executor.batches] == [(0, [10, 6]), (1, [4]), (1, [])]


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, None])
def test_max_prefill_chunk_bounds_a_chunk_apart_from_the_budget(chunk: int | None) -> None:
    engine, executor = make_engine(max_prefill_chunk=chunk, block_size=4)
    prompt = [7, 3, 9, 1, 4, 4, 2, 8, 6, 5]
    engine.add_request("a", prompt, greedy(3))
    assert run(engine)["a"].outputs[0].token_ids == expected_tokens(prompt, 3, VOCAB)
    assert max(executor.batches[0].query_lens) == (chunk or 10)
    # Nothing may be sampled before the prompt is complete.
    sampled = [any(batch.is_sampled) for batch in executor.batches]
    assert sampled == sorted(sampled)


def test_a_half_prefilled_sequence_keeps_its_place_and_counts_in_max_num_seqs() -> None:
    engine, executor = make_engine(max_num_batched_tokens=4, max_num_seqs=1)
    engine.add_request("long", [1] * 10, greedy(1))
    engine.add_request("short", [2, 3], greedy(1))
    run(engine)
    assert [shape(batch) for batch in executor.batches] == [(0, [4]), (0, [4]), (0, [2]), (0, [2])]


def test_equal_prompts_in_one_step_are_computed_once() -> None:
    """Two equal prompts in one step: the second hit blocks without KV in one engine, computed all twice in another."""
    engine, executor = make_engine(num_blocks=200, max_num_seqs=16, max_num_batched_tokens=10_000)
    prefix = [i % VOCAB for i in range(64)]
    for i in range(16):
        engine.add_request(str(i), [*prefix, i, i], greedy(1))
    run(engine)
    assert executor.computed_tokens == 66 + 15 * 2
    assert len(executor.batches) == 2


def test_a_waiting_twin_does_not_hold_up_others_behind_it() -> None:
    engine, executor = make_engine(max_num_batched_tokens=100)
    for name, prompt in (("a", [1] * 8), ("twin", [1] * 8), ("other", [2] * 8)):
        engine.add_request(name, prompt, greedy(1))
    engine.step()
    assert len(executor.batches[0].rows) == 2


def test_a_step_looks_at_no_more_waiting_twins_than_could_ever_run() -> None:
    engine, executor = make_engine(max_num_batched_tokens=100, max_num_seqs=4)
    manager = engine.scheduler.block_manager
    looked_at = []
    match_prefix = manager.match_prefix

    def counted(seq: Sequence, *, verify: bool = True) -> PrefixMatch:
        looked_at.append(seq.request_id)
        return match_prefix(seq, verify=verify)

    manager.match_prefix = counted  # type: ignore[method-assign]
    for i in range(100):
        engine.add_request(str(i), [1] * 8, greedy(1))
    engine.step()
    assert len(executor.batches[0].rows) == 1
    assert len(set(looked_at)) == 1 + 4


def test_samples_share_the_prompts_blocks() -> None:
    engine, _ = make_engine(num_blocks=64, block_size=4)
    engine.add_request("r", [i % VOCAB for i in range(33)], greedy(4, n=4))
    engine.step()
    engine.step()
    # 8 full prompt blocks once, and one block for each sample's own tail.
    assert engine.scheduler.block_manager.num_active_blocks == 8 + 4
    run(engine)


def test_preemption_puts_the_newest_back_to_the_front_and_keeps_its_cached_blocks() -> None:
    """Preempted requests that lose their place are starved and prefilled again and again."""
    engine, executor = make_engine(num_blocks=7, block_size=2, max_num_seqs=3)
    engine.add_request("old", [1, 2, 3], greedy(9))
    engine.add_request("new", [4, 5, 6], greedy(9))
    engine.add_request("later", [7, 8, 9], greedy(2))
    outputs = run(engine)
    assert outputs["old"].outputs[0].preemptions == 0
    assert outputs["new"].outputs[0].preemptions >= 1
    for name, prompt, count in (("old", [1, 2, 3], 9), ("new", [4, 5, 6], 9), ("later", [7, 8, 9], 2)):
        assert outputs[name].outputs[0].token_ids == expected_tokens(prompt, count, VOCAB)
    resumed = [new for batch in executor.batches for new in batch.new_sequences if len(new.token_ids) > new.prompt_len]
    assert resumed  # it came back with its output, not only with its prompt
    comebacks = [batch.step for batch in executor.batches for new in batch.new_sequences if new in resumed]
    first_of_later = [batch.step for batch in executor.batches for new in batch.new_sequences if new.token_ids[0] == 7]
    assert comebacks[0] <= first_of_later[0]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_lone_sequence_that_meets_the_end_of_the_pool_ends_with_its_partial_text(overlap: bool) -> None:
    """One engine died on a bare assert here, its derivative looped for ever."""
    engine, _ = make_engine(num_blocks=2, block_size=4, overlap=overlap)
    engine.add_request("a", [1, 2, 3], greedy(50))
    output = run(engine, max_steps=50)["a"].outputs[0]
    assert output.finish_reason == "error"
    assert output.error is not None
    assert output.error.code == "capacity"
    assert "2 blocks of 4" in output.error.message
    assert output.token_ids == expected_tokens([1, 2, 3], 6, VOCAB)
    engine.add_request("b", [1, 2, 3], greedy(2))
    assert run(engine)["b"].outputs[0].finish_reason == "length"


def test_without_max_tokens_a_sequence_ends_with_length_where_the_pool_ends() -> None:
    engine, _ = make_engine(num_blocks=2, block_size=4)
    engine.add_request("a", [1, 2, 3], greedy(None))  # type: ignore[arg-type]
    output = run(engine)["a"].outputs[0]
    assert (output.finish_reason, len(output.token_ids)) == ("length", 5)


@pytest.mark.parametrize(
    ("prompt", "code"),
    [([], "empty_prompt"), ([1] * 8, "exceeds_kv_pool"), ([1] * 40, "prompt_too_long"), ([VOCAB], "invalid_token")],
)
def test_what_can_never_run_is_refused_by_name(prompt: list[int], code: str) -> None:
    engine, _ = make_engine(num_blocks=2, block_size=4, max_model_len=40)
    with pytest.raises(RequestError) as caught:
        engine.add_request("a", prompt, greedy(4))
    assert caught.value.code == code
    assert not engine.has_unfinished


def test_the_option_that_shortens_the_context_is_named() -> None:
    """It said that this model takes 5."""
    engine, _ = make_engine(max_model_len=5, is_lowered=True)
    with pytest.raises(RequestError, match=r"but --max-model-len allows 5 with .* shorten it or raise that\."):
        engine.add_request("a", [1] * 5, greedy(4))


def test_a_duplicate_id_is_refused_and_the_first_goes_on() -> None:
    engine, _ = make_engine()
    engine.add_request("a", [1], greedy(2))
    with pytest.raises(RequestError, match="already running"):
        engine.add_request("a", [2], greedy(2))
    assert run(engine)["a"].outputs[0].token_ids == expected_tokens([1], 2, VOCAB)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_abort_in_any_state_releases_everything(steps: int, overlap: bool) -> None:
    """Aborts between two chunks, or on the last one, leaked pages."""
    engine, _ = make_engine(max_num_batched_tokens=8, block_size=4, num_blocks=16, overlap=overlap)
    for name in ("a", "b"):
        engine.add_request(name, [ord(name) % VOCAB] * 19, greedy(5))
    for _ in range(steps):
        engine.step()
    aborted = engine.abort("a")
    assert aborted is not None
    assert aborted.outputs[0].finish_reason == "abort"
    assert engine.abort("a") is None
    assert engine.check_integrity() == []
    assert run(engine)["b"].outputs[0].token_ids == expected_tokens([ord("b") % VOCAB] * 19, 5, VOCAB)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_interrupted_step_loses_nothing(overlap: bool) -> None:
    engine, executor = make_engine(overlap=overlap)
    engine.add_request("a", [1, 2, 3], greedy(6))
    executor.fail_at = 3
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    executor.fail_at = None
    assert executor.num_discards == 1  # nobody will ask for what was under way
    assert engine.check_integrity() == []
    assert run(engine)["a"].outputs[0].token_ids == expected_tokens([1, 2, 3], 6, VOCAB)


def test_no_news_of_a_request_comes_after_its_abort() -> None:
    """Not even what a step that was interrupted in its last moments had ready."""
    engine, _ = make_engine()
    engine.add_request("a", [1, 2, 3], greedy(6), stream=True)
    publish = engine.events.publish

    def interrupted(event: StepEvent) -> None:
        engine.events.publish = publish  # type: ignore[method-assign]
        raise KeyboardInterrupt

    engine.events.publish = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.abort("a")
    engine.add_request("b", [4, 5], greedy(1))
    assert [delta.request_id for delta in engine.step()] == ["b"]


class Interrupt:
    """Raises KeyboardInterrupt when the n-th line of the control plane is reached, as Ctrl-C may at any moment."""

    def __init__(self, countdown: int) -> None:
        self.countdown = countdown

    def __call__(self, frame: FrameType, event: str, argument: object) -> Interrupt | None:
        if "/nanoinfer/engine/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.countdown -= 1
            if self.countdown == 0:
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("overlap", [False, True])
def test_an_interrupt_at_any_line_of_a_step_loses_nothing(overlap: bool) -> None:
    prompts = {"a": [1, 2, 3, 4, 5], "b": [1, 2, 3, 4, 6], "c": [9] * 9}
    for line in some(range(1, 1500, 13)):
        engine, _ = make_engine(num_blocks=9, block_size=2, max_num_batched_tokens=8, overlap=overlap)
        for name, prompt in prompts.items():
            engine.add_request(name, prompt, greedy(6, n=2 if name == "b" else 1))
        outputs = {}
        tracer = sys.gettrace()
        sys.settrace(Interrupt(line))
        try:
            for _ in range(4):
                outputs |= {d.request_id: d.output for d in engine.step() if d.output}
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(tracer)
        assert engine.check_integrity() == [], line
        outputs |= run(engine)
        for name, prompt in prompts.items():
            for sample in outputs[name].outputs:
                assert sample.token_ids == expected_tokens(prompt, 6, VOCAB), line


def test_one_sample_at_the_end_of_the_pool_does_not_look_like_no_progress() -> None:
    engine, _ = make_engine(num_blocks=3, block_size=2, policy="prefill-first", enable_prefix_caching=False)
    engine.add_request("r", [1, 2, 3], greedy(40, n=2))
    output = run(engine)["r"]
    assert [sample.finish_reason for sample in output.outputs] == ["error", "error"]


def test_overlap_schedules_a_step_before_the_last_one_is_known() -> None:
    engine, executor = make_engine(overlap=True)
    engine.add_request("a", [1, 2], greedy(3))
    assert engine.step() == []
    assert len(executor.batches) == 1
    engine.step()
    assert len(executor.batches) == 2
    assert engine.scheduler.running[0].has_token_in_flight
    run(engine)
    assert len(executor.batches) == 3  # the end by length is known beforehand: not one wasted step


def test_a_late_stop_wastes_one_token_and_never_shows() -> None:
    prompt = [1, 2, 3]
    tokens = expected_tokens(prompt, 6, VOCAB)
    eos = frozenset([tokens[2]])
    engine, executor = make_engine(overlap=True, eos=eos)
    engine.add_request("a", prompt, greedy(6))
    assert run(engine)["a"].outputs[0].token_ids == tokens[: tokens.index(tokens[2]) + 1]
    assert executor.computed_tokens <= 3 + tokens.index(tokens[2]) + 1


def test_min_tokens_and_ignore_eos() -> None:
    prompt = [1, 2, 3]
    tokens = expected_tokens(prompt, 6, VOCAB)
    engine, _ = make_engine(eos=frozenset(tokens))
    engine.add_request("plain", prompt, greedy(6))
    engine.add_request("min", prompt, greedy(6, min_tokens=4))
    engine.add_request("ignore", prompt, greedy(6, ignore_eos=True))
    engine.add_request("own", prompt, greedy(6, ignore_eos=True, stop_token_ids=[tokens[1]]))
    outputs = {name: output.outputs[0] for name, output in run(engine).items()}
    assert [len(outputs[name].token_ids) for name in ("plain", "min", "ignore")] == [1, 5, 6]
    assert outputs["plain"].stop_reason is None
    assert outputs["own"].stop_reason == tokens[1]


def test_limits_are_validated() -> None:
    with pytest.raises(ConfigError, match="raise the first or lower the second"):
        EngineConfig(max_num_seqs=10, max_num_batched_tokens=9)
    for options in ({"seed": 2**63 - 1}, {"top_k": 2**70}, {"min_tokens": 2**70}, {"max_tokens": 2**40}):
        with pytest.raises(ConfigError):  # one such request made every later step fail
            SamplingParams(**({"max_tokens": None} | options))  # type: ignore[arg-type]
    for option in ({"device": None}, {"enforce_eager": "no"}, {"enable_prefix_caching": "off"}):
        with pytest.raises(ConfigError):
            EngineConfig(**option)  # type: ignore[arg-type]
    for penalty in (0, 1e-300, 1e-30, 1e30, 1e300):  # beyond float32 they made every token NaN or the first one
        with pytest.raises(ConfigError, match=r"it must be a number from 0\.01 to 100"):
            SamplingParams(repetition_penalty=penalty)
    with pytest.raises(ConfigError, match="did you mean 'max_model_len'"):
        EngineConfig.from_options({"max_modle_len": 5})


def test_numbers_of_numpy_and_paths_are_taken() -> None:
    """They were refused: max_num_seqs is np.int64(4); it must be a whole number of at least 1."""
    config = EngineConfig(model=Path("model"), max_num_seqs=np.int64(4), enforce_eager=np.bool_(True))  # type: ignore[arg-type]
    assert repr(config) == repr(EngineConfig(model="model", max_num_seqs=4, enforce_eager=True))
    params = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_p=np.float64(0.5),
        seed=np.uint8(3),  # type: ignore[arg-type]
        stop_token_ids=[np.int32(7)],  # type: ignore[arg-type]
    )
    assert repr(params) == repr(SamplingParams(temperature=0.5, top_p=0.5, seed=3, stop_token_ids=(7,)))
    with pytest.raises(ConfigError, match=r"seed is -1; it must be"):
        SamplingParams(seed=np.int64(-1))  # type: ignore[arg-type]

"""What a benchmark computes from steps and results: phases, steady state, roofline, means, comparisons, sweeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from nanoinfer.cli.bench import complete_sweep
from nanoinfer.cli.bench_compare import compare, comparison_lines, other_settings, refuse_other_work
from nanoinfer.cli.bench_options import Sweep, parse_sweep
from nanoinfer.cli.bench_result import combine
from nanoinfer.cli.bench_roofline import StepCost, achieved, with_limits
from nanoinfer.cli.bench_steps import StepLog
from nanoinfer.cli.bench_sweep import best_within_limits, latency_plot, sweep_loads
from nanoinfer.cli.bench_view import si
from nanoinfer.engine.events import FinishedSequence, RequestTiming, StepEvent
from nanoinfer.engine.info import DeviceLimits
from nanoinfer.errors import UserError
from nanoinfer.models.config import ModelConfig, RopeConfig

ENDED = FinishedSequence("r", 0, "length", 4, 0, 3, 0, RequestTiming(0.0))
IDLE = StepEvent(
    step=0, time=0.0, kind="idle", running=0, waiting=0, prefill_tokens=0, decode_tokens=0, cached_tokens=0,
    prompt_tokens=0, blocks_active=0, blocks_cached=0, blocks_free=8, evictions=0, preemptions=0, emitted=(),
    finished=(), schedule_ms=0.0, device_ms=0.0, step_ms=0.0,
)  # fmt: skip
MODEL = ModelConfig(
    architecture="Qwen3ForCausalLM", vocab_size=1000, hidden_size=64, intermediate_size=256, num_layers=3, num_heads=4,
    num_kv_heads=2, head_dim=16, rms_norm_eps=1e-6, rope=RopeConfig(theta=1e4), max_position_embeddings=512,
)  # fmt: skip


def decode(time: float, running: int, ended: int = 0, **fields: Any) -> StepEvent:
    sequences = running + ended
    return replace(
        IDLE, time=time, kind="decode", running=running, finished=(ENDED,) * ended, decode_tokens=sequences,
        emitted=tuple((f"r{i}", 1) for i in range(sequences)), step_ms=500.0, **fields,
    )  # fmt: skip


def log_of(*events: StepEvent) -> StepLog:
    log = StepLog()
    for event in events:
        log.observe(event)
    return log


def test_a_steps_time_is_from_result_to_result_and_an_idle_engines_wait_is_nobodys() -> None:
    log = log_of(
        decode(1.0, 2),
        decode(3.0, 2),  # two seconds since the last result, although the step itself took half of one
        decode(4.0, 0, ended=2),
        replace(IDLE, time=5.0),
        decode(9.0, 1),  # nothing was running before: its own half second
    )
    phase = log.phases["decode"]
    assert (phase.steps, phase.seconds, phase.decode_tokens) == (4, 0.5 + 2 + 1 + 0.5, 7)
    assert set(log.phases) == {"decode"}


def test_the_steady_state_is_the_longest_full_stretch() -> None:
    ramp = [decode(float(t), t) for t in range(1, 10)]  # 1 to 9 sequences
    full = [decode(10.0, 10), decode(11.0, 9, ended=1), decode(12.0, 10)]
    drain = [decode(13.0, 5, ended=2), decode(14.0, 0, ended=5)]
    steady = log_of(*ramp, *full, *drain).steady_state()
    assert steady is not None
    # 9 of 10 is full as well: the last step of the ramp counts.
    assert (steady.seconds, steady.steps, steady.output_tokens, steady.peak_sequences) == (4.0, 4, 39, 10)
    assert steady.output_throughput == pytest.approx(39 / 4)
    assert steady.mean_sequences == pytest.approx(39 / 4)
    assert StepLog().steady_state() is None


# -- roofline ----------------------------------------------------------------------------------------------------------


def published(**fields: Any) -> ModelConfig:
    qwen3 = {"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_layers": 28, "num_heads": 16,
             "num_kv_heads": 8, "head_dim": 128, "tie_word_embeddings": True, "qk_norm": True}  # fmt: skip
    return replace(MODEL, **{**qwen3, **fields})


def test_what_a_decode_step_of_qwen3_reads() -> None:
    cost = StepCost.of(published(), "bfloat16")
    assert (cost.weight_bytes, cost.kv_bytes_per_token) == (2 * 596_049_920, 114_688)
    untied = StepCost.of(published(tie_word_embeddings=False), "bfloat16")
    assert untied.weight_bytes == cost.weight_bytes  # of the table only the tokens' own rows are read
    halves = StepCost.of(published(), "bfloat16", tp=2)
    assert halves.weight_bytes == pytest.approx(cost.weight_bytes / 2, rel=1e-3)
    assert halves.kv_bytes_per_token == 57_344


def test_operations_are_those_of_the_matrices_and_of_attention() -> None:
    cost = StepCost.of(MODEL, "float32")
    # q, k, v, o, gate, up, down of three layers; norms are less than a percent of them.
    matrices = 3 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 256)
    assert cost.layer_parameters == pytest.approx(matrices, rel=0.01)
    step = replace(decode(1.0, 2), kind="mixed", prefill_tokens=10, prefill_pairs=55, decode_context=40)
    phase = log_of(step).phases["mixed"]
    # Ten of twelve tokens are not sampled: in the last layer they need only keys and values.
    spared = 10 * (64 * 64 + 3 * 64 * 256)
    attention = 4 * 4 * 16 * (2 * 55 + 3 * 40)
    assert cost.flops(phase) == 2 * (12 * cost.layer_parameters + 2 * 64_000 - spared) + attention


def test_fractions_of_the_measured_limits() -> None:
    cost = StepCost.of(MODEL, "float32")
    log = log_of(
        replace(decode(1.0, 1), kind="prefill", decode_tokens=0, prefill_tokens=10, prefill_pairs=55),
        decode(3.0, 1, decode_context=11),
        decode(5.0, 1, decode_context=12),
    )
    found = achieved(cost, log.phases)
    read = 2 * cost.weight_bytes + 23 * cost.kv_bytes_per_token
    assert found["decode"] == {"bytes_per_step": read / 2, "bytes_per_s": read / 4.0}
    limits = DeviceLimits(name="d", memory_bytes=1, threads=1, copy_bytes_per_s=read, flops_per_s=1e9)
    assert with_limits(found, limits)["decode"]["fraction_of_copy"] == 0.25
    flops = cost.flops(log.phases["prefill"])
    assert with_limits(found, limits)["prefill"]["fraction_of_product"] == pytest.approx(flops / 0.5 / 1e9)
    assert achieved(cost, {}) == {}


def test_decimal_units() -> None:
    assert [si(n, "B/s") for n in (7.0, 13.5e9, 4.29e12, 3e16)] == ["7.00 B/s", "13.5 GB/s", "4.29 TB/s", "30,000 TB/s"]


# -- results -----------------------------------------------------------------------------------------------------------


def test_repeats_are_averaged_at_every_depth() -> None:
    runs = [
        {"x": 1.0, "n": 4, "kv": {"peak": 10, "name": "a"}, "none": None, "rate": None, "dict": None},
        {"x": 3.0, "n": 4, "kv": {"peak": 30, "name": "a"}, "none": None, "rate": 2.0, "dict": {"y": 5}},
    ]
    combined = combine(runs)
    assert combined["x"] == 2.0
    assert combined["n"] == 4
    assert combined["kv"] == {"peak": 20.0, "name": "a"}
    assert (combined["none"], combined["rate"], combined["dict"]) == (None, 2.0, {"y": 5})
    assert combined["std"] == {"x": pytest.approx(2**0.5), "n": 0.0, "rate": 0.0}
    assert combined["repeats"] == runs
    assert combine(runs[:1]) == runs[0]


def test_a_comparison_says_better_worse_or_same() -> None:
    earlier = {"output_throughput": 100.0, "p99_ttft_ms": 10.0, "preemptions": 0, "kv": {"peak_active": 7}}
    now = {"output_throughput": 125.0, "p99_ttft_ms": 12.0, "preemptions": 2, "kv": {"peak_active": 7}}
    found = compare(earlier, now)
    assert {name: row["verdict"] for name, row in found.items()} == {
        "output_throughput": "better", "p99_ttft_ms": "worse", "preemptions": "worse", "kv.peak_active": "same",
    }  # fmt: skip
    assert found["output_throughput"]["ratio"] == 1.25
    assert found["preemptions"]["ratio"] is None
    noisy = compare({**earlier, "std": {"output_throughput": 20.0}}, {**now, "std": {"output_throughput": 10.0}})
    assert noisy["output_throughput"]["verdict"] == "noise"
    lines = comparison_lines(found, ["kernels: eager -> triton"], Path("old.json"))
    assert lines[1] == "  kernels: eager -> triton"
    assert any(line.split() == ["output_throughput", "100", "125", "1.25x", "+", "better"] for line in lines)


def test_other_work_is_refused_and_other_settings_are_named() -> None:
    earlier = {
        "model_id": "m",
        "num_prompts": 4,
        "engine": {"kernels": "eager", "num_blocks": 5},
        "env": {"torch": "1"},
    }
    now = {"model_id": "m", "num_prompts": 8, "engine": {"kernels": "triton", "num_blocks": 5}, "env": {"torch": "2"}}
    with pytest.raises(UserError, match=r"old\.json cannot be compared: its num_prompts is 4, here it is 8"):
        refuse_other_work(earlier, now, Path("old.json"))
    refuse_other_work({"model_id": "m", "backend": "vllm"}, now, Path("vllm.json"))  # what it lacks is not compared
    assert other_settings(earlier, now) == ["kernels: eager -> triton", "torch: 1 -> 2"]


# -- sweeps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "sweep"),
    [
        ("auto", Sweep("concurrency", None)),
        ("8,1,2", Sweep("concurrency", (1.0, 2.0, 8.0))),
        ("concurrency:4", Sweep("concurrency", (4.0,))),
        ("rate:0.5,2", Sweep("rate", (0.5, 2.0))),
    ],
)
def test_sweeps(given: str, sweep: Sweep) -> None:
    assert parse_sweep(given) == sweep


@pytest.mark.parametrize("given", ["x", "1,,2", "users:4", "0", "rate:-1", "1.5", "rate:inf", "rate:nan"])
def test_what_is_not_a_sweep(given: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_sweep(given)


def test_a_bare_sweep_is_auto() -> None:
    assert complete_sweep(["--sweep", "-q"]) == ["--sweep", "auto", "-q"]
    assert complete_sweep(["model", "--sweep"]) == ["model", "--sweep", "auto"]
    assert complete_sweep(["--sweep", "1,2"]) == ["--sweep", "1,2"]
    assert complete_sweep(["--sweep", "rate:0.5"]) == ["--sweep", "rate:0.5"]
    assert complete_sweep(["--sweep", "folder/1"]) == ["--sweep", "auto", "folder/1"]
    assert complete_sweep(["--sweep", "01-ai/Yi-6B"]) == ["--sweep", "auto", "01-ai/Yi-6B"]
    assert complete_sweep(["--sweep", "smollm2"]) == ["--sweep", "auto", "smollm2"]
    assert complete_sweep(["--sweep", "--goodput=ttft:200"]) == ["--sweep", "auto", "--goodput=ttft:200"]
    assert complete_sweep([]) == []


@pytest.mark.parametrize(
    "word", ["rate:inf", "1,", "rate:1e9", "", "rate:", "1,x", "2x", "-1", ",", "rate:1/2", "x", "fast"]
)
def test_what_looks_like_levels_is_not_taken_for_the_model(word: str) -> None:
    assert complete_sweep(["--sweep", word, "-q"]) == ["--sweep", word, "-q"]


def test_a_model_that_exists_may_look_like_levels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("7b", "a:b", "1"):
        (tmp_path / name).mkdir()
    assert complete_sweep(["--sweep", "7b"]) == ["--sweep", "auto", "7b"]
    assert complete_sweep(["--sweep", "a:b"]) == ["--sweep", "auto", "a:b"]
    assert complete_sweep(["--sweep", "1"]) == ["--sweep", "1"]


def test_loads_of_a_sweep() -> None:
    auto = sweep_loads(Sweep("concurrency", None), num_prompts=100, max_num_seqs=20)
    assert [(load.max_concurrency, load.count) for load in auto] == [(1, 8), (2, 8), (4, 16), (8, 32), (16, 64)]
    [load] = sweep_loads(Sweep("rate", (2.0,)), 100, 20)
    assert (load.count, load.rate, load.max_concurrency) == (100, 2.0, None)


def point(level: int, throughput: float, tpot: float | None, attainment: float = 1.0) -> dict[str, Any]:
    return {
        "max_concurrency": level, "output_throughput": throughput, "p50_tpot_ms": tpot, "slo_attainment": attainment
    }  # fmt: skip


def test_the_plot_has_each_level_at_its_place() -> None:
    lines = latency_plot("concurrency", [point(1, 50.0, 10.0), point(2, 100.0, 20.0), point(4, 10.0, None)])
    rows = [line.partition("|")[2] for line in lines if "|" in line]
    assert rows[0].index("b") == len(rows[0]) - 1 == 59  # the fastest and slowest: the far corner
    middle = next(row for row in rows if "a" in row)
    assert abs(middle.index("a") - 59 / 2) <= 1
    assert abs(rows.index(middle) - (len(rows) - 1) / 2) <= 1
    assert lines[-1].strip() == "at once: a 1, b 2"
    assert "\n".join(lines).isascii()
    assert latency_plot("concurrency", [point(1, 1.0, None)]) == []


def test_the_best_level_is_the_fastest_that_keeps_the_limits() -> None:
    points = [point(1, 10.0, 1.0, 1.0), point(2, 30.0, 1.0, 0.96), point(4, 50.0, 1.0, 0.5)]
    assert best_within_limits(points, 0.95) is points[1]
    assert best_within_limits(points[2:], 0.95) is None

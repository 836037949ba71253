"""`nanoinfer bench` on a stand-in engine: its workloads, its figures, its result document and its exit codes."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM
from program import Program

from nanoinfer.cli.bench import join_goodput
from nanoinfer.cli.bench_run import default_model
from nanoinfer.cli.interrupts import Interrupts
from nanoinfer.cli.load_driver import LoadDriver
from nanoinfer.cli.workloads import BenchRequest, nano_vllm_requests
from nanoinfer.config import EngineConfig, SamplingParams
from nanoinfer.engine.metrics import Metrics

SMALL = ("--device", "cpu", "--num-prompts", "12", "--input-len", "10:30", "--output-len", "4:9")

VLLM_KEYS = {
    "date", "backend", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness", "max_concurrency",
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
    "request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
    "max_concurrent_requests",
    *(f"{s}_{m}_ms" for m in ("ttft", "tpot", "itl", "e2el") for s in ("mean", "median", "std", "p50", "p90", "p99")),
}  # fmt: skip


def bench(nanoinfer: Program, *arguments: str) -> dict[str, Any]:
    result = nanoinfer("bench", *SMALL, *arguments, "--json")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert isinstance(document, dict)
    return document


def test_nano_vllm_preset_has_the_published_token_counts() -> None:
    requests = nano_vllm_requests()
    assert len(requests) == 256
    assert sum(len(request.token_ids) for request in requests) == 142_827
    assert sum(request.output_tokens for request in requests) == 133_966
    assert max(max(request.token_ids) for request in requests) <= 10_000


def test_the_result_has_vllms_keys_and_adds_up(nanoinfer: Program) -> None:
    result = bench(nanoinfer)
    assert set(result) >= VLLM_KEYS
    sent = [(len(prompt), params.max_tokens) for prompt, params, _ in nanoinfer.llm.submitted[1:]]
    assert (result["completed"], result["failed"], len(sent)) == (12, 0, 12)
    assert result["total_input_tokens"] == sum(length for length, _ in sent)
    assert result["total_output_tokens"] == sum(tokens for _, tokens in sent)
    assert result["output_throughput"] == pytest.approx(result["total_output_tokens"] / result["duration"])
    assert result["n_itl"] == result["total_output_tokens"] - 12
    assert result["request_rate"] == "inf"
    assert result["request_goodput"] is None
    assert result["max_concurrent_requests"] == 12
    assert result["engine"]["block_size"] == 4
    assert nanoinfer.llm.closed


def test_outputs_are_forced_to_their_length(nanoinfer: Program) -> None:
    bench(nanoinfer, "--temperature", "0.3")
    assert all(params.ignore_eos and params.temperature == 0.3 for _, params, _ in nanoinfer.llm.submitted)


def test_warm_up_has_other_prompts_and_leaves_the_cache_cold(nanoinfer: Program) -> None:
    result = bench(nanoinfer, "--warmup", "3")
    prompts = [tuple(prompt) for prompt, _, _ in nanoinfer.llm.submitted]
    assert len(prompts) == 15
    assert len(set(prompts)) == 15
    assert nanoinfer.llm.resets == 1
    assert result["prefix_cache"]["hits"] == 0
    assert result["completed"] == 12
    bench(nanoinfer, "--warmup", "0")
    assert len(nanoinfer.llm.submitted) == 12


def test_the_same_seed_gives_the_same_prompts(nanoinfer: Program) -> None:
    prompts = []
    for seed in ("1", "1", "2"):
        bench(nanoinfer, "--seed", seed)
        prompts.append([prompt for prompt, _, _ in nanoinfer.llm.submitted])
    assert prompts[0] == prompts[1] != prompts[2]


def test_prefix_repetition_hits_the_cache(nanoinfer: Program) -> None:
    result = bench(nanoinfer, "--dataset", "prefix-repetition", "--prefix-len", "40", "--num-prefixes", "2")
    # Of twelve prompts the first with each prefix computes it, and the other ten find its 10 blocks of 4 tokens.
    assert result["prefix_cache"]["hits"] >= 10 * 40
    assert result["prefix_cache"]["hit_rate"] == pytest.approx(
        result["prefix_cache"]["hits"] / result["total_input_tokens"]
    )


def test_max_concurrency_is_kept(nanoinfer: Program) -> None:
    result = bench(nanoinfer, "--max-concurrency", "3")
    assert (result["max_concurrent_requests"], result["max_concurrency"]) == (3, 3)


def test_waiting_and_prefill_stand_apart_from_the_time_to_the_first_token(nanoinfer: Program) -> None:
    nanoinfer.make = lambda config: FakeLLM(config, before_step=lambda step: time.sleep(0.001))
    result = bench(nanoinfer, "--max-num-seqs", "1", "--warmup", "0", "--goodput", "ttft:60000")
    assert result["mean_ttft_ms"] == pytest.approx(result["mean_queue_ms"] + result["mean_prefill_ms"])
    assert result["mean_queue_ms"] > 5 * result["mean_prefill_ms"], "all come at once, and one runs at a time"
    table = nanoinfer("bench", *SMALL, "--max-num-seqs", "1").out
    assert {"TTFT", "queue", "prefill"} <= {line.split(" ")[0] for line in table.splitlines()}


def test_percentiles_of_few_samples_are_marked_and_their_number_stands_beside(nanoinfer: Program) -> None:
    lines = nanoinfer("bench", *SMALL, "--output-len", "30").out.splitlines()
    rows = {line.split(" ")[0]: line.split()[-3:] for line in lines}
    p99, n = rows["TTFT"][-2:]
    assert (p99[-1], n) == ("*", "12")
    p99, n = rows["ITL"][-2:]
    assert (p99[-1] == "*", n) == (False, "348")
    assert lines[-1] == "* fewer than 100 samples: hardly more than the maximum"


def test_repeats_give_mean_and_deviation_and_start_cold(nanoinfer: Program) -> None:
    result = bench(nanoinfer, "--repeat", "3")
    runs = [run["output_throughput"] for run in result["repeats"]]
    assert result["output_throughput"] == pytest.approx(statistics.fmean(runs))
    assert result["std"]["output_throughput"] == pytest.approx(statistics.stdev(runs))
    assert nanoinfer.llm.resets == 3
    assert result["prefix_cache"]["hits"] == 0


def test_goodput_and_the_gate(nanoinfer: Program) -> None:
    generous = bench(nanoinfer, "--goodput", "ttft:60000", "tpot:60000")
    assert generous["slo_attainment"] == 1.0
    assert generous["request_goodput"] == pytest.approx(generous["request_throughput"])
    assert generous["goodput_slos_ms"] == {"ttft": 60000.0, "tpot": 60000.0}
    strict = nanoinfer("bench", *SMALL, "--goodput", "ttft:0.000001", "--slo-attainment", "0.9", "--json")
    assert strict.code == 4
    assert json.loads(strict.out)["slo_attainment_by_metric"] == {"ttft": 0.0}
    assert "0.0% kept the limits, fewer than 90%" in strict.err


@pytest.mark.parametrize(
    ("given", "joined"),
    [
        (["--goodput", "ttft:200", "tpot:50", "-q"], ["--goodput", "ttft:200 tpot:50", "-q"]),
        (["m", "--goodput=ttft:200", "tpot:50"], ["--goodput", "ttft:200 tpot:50", "m"]),
        (["--goodput", "ttft:200", "--goodput", "tpot:50"], ["--goodput", "ttft:200 tpot:50"]),
        (["--goodput", "ttft:200,tpot:50", "m"], ["--goodput", "ttft:200,tpot:50", "m"]),
        (["--goodput", "model"], ["--goodput", "model"]),
        (["--goodput"], ["--goodput"]),
        (["-q"], ["-q"]),
    ],
)
def test_goodput_takes_several_words_as_vllm_does(given: list[str], joined: list[str]) -> None:
    assert join_goodput(given) == joined


def test_the_table_names_what_was_measured(nanoinfer: Program) -> None:
    result = nanoinfer("bench", *SMALL, "--goodput", "ttft:60000", "--repeat", "2")
    for text in ("12 requests of 10:30 tokens, answers of 4:9, all at once", "TTFT", "ITL", "±", "goodput", "p99"):
        assert text in result.out
    assert max(map(len, result.out.splitlines())) <= 80


def test_a_workload_of_one_request_of_one_token(nanoinfer: Program) -> None:
    result = nanoinfer("bench", "--device", "cpu", "--num-prompts", "1", "--input-len", "1", "--output-len", "2")
    assert "1 request of 1 token, answers of 2, all at once" in result.out


def test_the_result_file(nanoinfer: Program, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    assert nanoinfer("bench", *SMALL, "-o", out).code == 0
    assert json.loads(out.read_text())["completed"] == 12
    again = nanoinfer("bench", *SMALL, "-o", out)
    assert again.code == 2
    assert "exists already" in again.err
    assert nanoinfer("bench", *SMALL, "-o", out, "--overwrite").code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--goodput", "speed:3"), "unknown SLO 'speed'"),
        (("--slo-attainment", "0.9"), "--slo-attainment needs limits to attain"),
        (("--request-rate", "0"), "--request-rate is 0.0; it must be above 0."),
        (("--temperature", "1000"), "temperature is 1000.0; it must be a number from 0 to 100."),
        (("--repeat", "0"), "--repeat is 0; it must be at least 1."),
        (("--input-len", "9:3"), "must be at least 1, and its second number not below the first"),
        (("--warmup", "some"), "neither a number of requests nor auto"),
        (("--preset", "nano-vllm", "--input-len", "9"), "--preset fixes the lengths"),
        (("--dataset", "sharegpt"), "sharegpt"),
        (("--max-num-seqs", "0"), "max_num_seqs is 0"),
    ],
)
def test_mistakes_are_refused_before_the_load(nanoinfer: Program, arguments: tuple[str, ...], message: str) -> None:
    result = nanoinfer("bench", *arguments)
    assert (result.code, nanoinfer.llm) == (2, None)
    assert message in " ".join(result.err.split())


def test_a_workload_that_does_not_fit_is_refused(nanoinfer: Program) -> None:
    result = nanoinfer("bench", "--device", "cpu", "--input-len", "3000")
    assert result.code == 2
    assert "the longest request has 3064 tokens, prompt and output, but this engine takes 2048" in result.err


@pytest.mark.parametrize(
    ("given", "model", "load_format"),
    [
        ({"device": "cpu"}, "smollm2", "auto"),
        ({"device": "cpu", "tensor_parallel_size": 2}, None, "dummy"),
        ({"device": "cuda"}, None, "dummy"),
        ({"device": "cuda", "model": "mine"}, "mine", "auto"),
        ({"device": "cpu", "load_format": "dummy"}, None, "dummy"),
    ],
)
def test_what_is_measured_without_a_model(given: dict[str, Any], model: str | None, load_format: str) -> None:
    chosen = default_model(EngineConfig(**given))
    assert (chosen.model, chosen.load_format) == (model, load_format)
    assert (chosen.model_named == "built in, because no model was named") == (model == "smollm2")


# -- the open loop, on a clock of its own ------------------------------------------------------------------------------


class Time:
    """A clock that moves only when somebody sleeps or a step runs."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def test_open_loop_latencies_count_from_when_a_request_was_due() -> None:
    clock = Time()
    llm = FakeLLM(EngineConfig(), before_step=lambda step: clock.sleep(1.0))
    llm.engine._clock = clock
    requests = [BenchRequest([1, 2, 3], 4, arrival=0.0), BenchRequest([4, 5, 6], 1, arrival=0.5)]
    driver = LoadDriver(llm, requests, SamplingParams(ignore_eos=True), clock=clock, sleep=clock.sleep)
    metrics, events = Metrics(), llm.events.subscribe()
    driver.run(Interrupts(), lambda: [metrics.observe(driver.observed(event)) for event in events.drain()])
    by_id = {sequence.request_id: sequence for sequence in metrics.sequences}
    # The second request was due in the middle of the first step; the loop could send it only half a second later.
    assert by_id["bench-1"].timing.ttft_ms == pytest.approx(1500.0)
    assert by_id["bench-0"].timing.ttft_ms == pytest.approx(1000.0)
    assert by_id["bench-0"].timing.e2e_ms == pytest.approx(4000.0)
    shown = metrics.window_latencies().ttft
    assert shown is not None
    assert (shown.count, shown.mean) == (2, pytest.approx(1250.0)), "the display counts in the same way"


def test_the_wait_for_a_place_under_max_concurrency_counts_too() -> None:
    clock = Time()
    llm = FakeLLM(EngineConfig(), before_step=lambda step: clock.sleep(1.0))
    llm.engine._clock = clock
    requests = [BenchRequest([1, 2, 3], 4, arrival=0.0), BenchRequest([4, 5, 6], 1, arrival=0.5)]
    driver = LoadDriver(
        llm, requests, SamplingParams(ignore_eos=True), max_concurrency=1, clock=clock, sleep=clock.sleep
    )
    metrics, events = Metrics(), llm.events.subscribe()
    driver.run(Interrupts(), lambda: [metrics.observe(driver.observed(event)) for event in events.drain()])
    assert driver.result.max_in_flight == 1
    assert metrics.sequences[1].timing.ttft_ms == pytest.approx(4500.0), "due at 0.5, first token at 5"


def test_open_loop_waits_for_arrivals_and_serves_all() -> None:
    clock = Time()
    llm = FakeLLM(EngineConfig())
    llm.engine._clock = clock
    requests = [BenchRequest([1, 2], 2, arrival=time) for time in (0.0, 3.0, 10.0)]
    driver = LoadDriver(llm, requests, SamplingParams(ignore_eos=True), clock=clock, sleep=clock.sleep)
    result = driver.run(Interrupts(), lambda: None)
    assert driver.done == 3
    assert result.seconds == pytest.approx(10.0, abs=0.06)
    assert result.max_in_flight == 1

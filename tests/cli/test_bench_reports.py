"""`nanoinfer bench` on a stand-in engine: identities of its figures, file workloads, sweeps, comparisons, formats."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_llm import FakeLLM
from program import Program

from nanoinfer.engine.event_log import read_event_log
from nanoinfer.engine.latency import gaps_ms, latencies_ms
from nanoinfer.ui.console import Console

SMALL = ("--device", "cpu", "--num-prompts", "12", "--input-len", "10:30", "--output-len", "4:9", "--warmup", "0")


def bench(nanoinfer: Program, *arguments: str | Path, code: int = 0) -> dict[str, Any]:
    result = nanoinfer("bench", *arguments, "--json")
    assert result.code == code, result.err
    document = json.loads(result.out)
    assert isinstance(document, dict)
    return document


# -- identities --------------------------------------------------------------------------------------------------------


class Losing(FakeLLM):
    """Ends one request in the middle, as a failure would."""

    def step(self) -> Any:
        deltas = super().step()
        self.abort("bench-3")
        return deltas


def test_figures_agree_with_the_recorded_events(nanoinfer: Program, tmp_path: Path) -> None:
    nanoinfer.make = Losing
    path = tmp_path / "events.jsonl"
    limits = ("--goodput", "ttft:60000", "tpot:60000", "itl_p99:60000")
    result = bench(nanoinfer, *SMALL, *limits, "--max-concurrency", "5", "--events", path, code=3)
    events = read_event_log(path).events
    ended = [sequence for event in events for sequence in event.finished]
    done = [sequence for sequence in ended if sequence.succeeded]
    assert (len(ended), len(done), result["completed"], result["failed"]) == (12, 11, 11, 1)
    for each in done:
        found = latencies_ms(each)
        ttft, tpot = found["ttft"], found["tpot"]
        assert ttft is not None
        assert tpot is not None
        assert found["e2e"] == pytest.approx(ttft + tpot * (each.output_tokens - 1))
        assert sum(gaps_ms(each)) == pytest.approx(tpot * (each.output_tokens - 1))
    # Sums over requests are the totals, also those of the steps: what the lost request had computed is in these alone.
    assert result["total_input_tokens"] == sum(s.prompt_tokens for s in done)
    assert result["total_output_tokens"] == sum(s.output_tokens for s in done)
    assert sum(count for e in events for _, count in e.emitted) == sum(s.output_tokens for s in ended)
    phases = result["phases"].values()
    prompts = sum(s.prompt_tokens - s.cached_tokens for s in ended)
    assert sum(phase["prefill_tokens"] for phase in phases) == prompts
    assert sum(phase["decode_tokens"] for phase in phases) == sum(s.output_tokens - 1 for s in ended)
    assert sum(phase["steps"] for phase in phases) == sum(e.kind != "idle" for e in events)
    # Throughputs times the duration are the totals, and percentiles are numpy's.
    for key, total in (("request_throughput", 11), ("output_throughput", result["total_output_tokens"])):
        assert result[key] * result["duration"] == pytest.approx(total)
    gaps = np.concatenate([gaps_ms(s) for s in done])
    ttfts, e2els = [s.timing.ttft_ms for s in done], [s.timing.e2e_ms for s in done]
    for name, values in (("ttft", ttfts), ("e2el", e2els), ("itl", gaps)):
        for percentile in (50, 90, 99):
            assert result[f"p{percentile}_{name}_ms"] == pytest.approx(np.percentile(values, percentile))
        assert result[f"mean_{name}_ms"] == pytest.approx(np.mean(values))
        assert result[f"std_{name}_ms"] == pytest.approx(np.std(values))
    # The lost request counts against goodput and attainment, although every limit is generous.
    assert result["slo_attainment"] == pytest.approx(11 / 12)
    assert list(result["slo_attainment_by_metric"].values()) == pytest.approx([11 / 12] * 3)
    assert result["request_goodput"] * result["duration"] == pytest.approx(11)


def test_a_result_does_not_grow_with_its_requests(nanoinfer: Program) -> None:
    small, large = (bench(nanoinfer, *SMALL, "--num-prompts", number) for number in ("12", "300"))
    assert len(json.dumps(large)) < 1.2 * len(json.dumps(small))
    assert {"env", "engine", "device", "seed", "requests_sha256"} <= set(small)


def test_steady_state_roofline_and_device(nanoinfer: Program) -> None:
    result = bench(nanoinfer, *SMALL)
    assert result["device"]["name"] == "Fake CPU"
    decode, device = result["roofline"]["decode"], result["device"]
    assert decode["fraction_of_copy"] == pytest.approx(decode["bytes_per_s"] / device["copy_bytes_per_s"])
    phase = result["phases"]["decode"]
    assert decode["bytes_per_s"] * phase["seconds"] == pytest.approx(decode["bytes_per_step"] * phase["steps"])
    steady = result["steady_state"]
    assert steady["peak_sequences"] == 12
    assert 0 < steady["seconds"] <= result["duration"]
    assert steady["output_throughput"] == pytest.approx(steady["output_tokens"] / steady["seconds"])


# -- workloads from files ----------------------------------------------------------------------------------------------


def test_a_sharegpt_file(nanoinfer: Program, tmp_path: Path) -> None:
    data = [{"conversations": [{"value": f"question {i}"}, {"value": "a" * (4 + i)}]} for i in range(6)]
    (tmp_path / "s.json").write_text(json.dumps(data))
    arguments = ("--dataset", "sharegpt", "--dataset-path", tmp_path / "s.json", "--device", "cpu", "--warmup", "0")
    result = bench(nanoinfer, *arguments, "--num-prompts", "5")
    assert (result["completed"], result["dataset"], result["dataset_file"]) == (5, "sharegpt", "s.json")
    for prompt, params, _ in nanoinfer.llm.submitted:
        number = int(bytes(prompt).decode().removeprefix("question "))
        assert params.max_tokens == 4 + number
    too_many = nanoinfer("bench", *arguments, "--num-prompts", "7")
    assert too_many.code == 2
    assert "has only 6 conversations of a usable length, fewer than the 7 asked for" in " ".join(too_many.err.split())


def test_a_custom_file_runs_as_it_is(nanoinfer: Program, tmp_path: Path) -> None:
    lines = [{"prompt": "first", "output_tokens": 3}, {"messages": [{"role": "user", "content": "hi"}]}]
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = bench(nanoinfer, "--dataset", "custom", "--dataset-path", path, "--output-len", "6", "--device", "cpu")
    measured = nanoinfer.llm.submitted[-2:]
    assert [bytes(prompt).decode() for prompt, _, _ in measured] == ["first", "<user>hi<assistant>"]
    assert [params.max_tokens for _, params, _ in measured] == [3, 6]
    assert result["num_prompts"] == 2


def test_a_trace_is_sent_at_its_times(nanoinfer: Program, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    lines = [{"timestamp": t, "input_length": 9, "output_length": 2, "hash_ids": [0]} for t in (5000, 5020, 5060)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = bench(nanoinfer, "--dataset", "trace", "--dataset-path", path, "--device", "cpu", "--warmup", "0")
    assert 0.06 <= result["duration"] < 2
    assert result["completed"] == 3
    assert result["prefix_cache"]["hits"] == 2 * 8  # the same hash id is the same text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--dataset", "custom"), "--dataset custom needs the file"),
        (("--dataset-path", "x"), "--dataset-path belongs to"),
        (("--dataset", "trace", "--dataset-path", "x", "--request-rate", "2"), "a trace has its own arrival times"),
        (("--dataset", "trace", "--dataset-path", "x", "--output-len", "2"), "come from its file"),
        (("--dataset", "custom", "--dataset-path", "/none"), "cannot read /none"),
        (("--preset", "nano-vllm", "--dataset", "prefix-repetition"), "--preset is a workload of its own"),
        (("--sweep", "1,2", "--max-concurrency", "2"), "--sweep sets the load itself; leave --max-concurrency out."),
        (("--sweep", "rate:1", "--request-rate", "2"), "sets the load itself; leave --request-rate out."),
        (("--sweep", "--compare", "x"), "leave --sweep out"),
        (("--sweep", "rate:inf"), "'rate:inf': the levels must be above 0"),
        (("--sweep", "1,"), "'1,' is not a sweep; write 1,2,4,8 or rate:0.5,1,2 or auto"),
        (("--sweep", ""), "'' is not a sweep; write 1,2,4,8"),
        (("--compare", "/none"), "cannot read the result /none"),
        (("--json", "--format", "csv"), "--json and --format csv contradict"),
    ],
)
def test_contradictions_are_refused_before_the_load(
    nanoinfer: Program, arguments: tuple[str, ...], message: str
) -> None:
    result = nanoinfer("bench", *arguments)
    assert (result.code, nanoinfer.llm) == (2, None)
    assert message in " ".join(result.err.split())


# -- sweeps, comparisons, formats --------------------------------------------------------------------------------------


def test_a_sweep_measures_every_level_on_a_cold_cache(nanoinfer: Program, tmp_path: Path) -> None:
    out = tmp_path / "sweep.json"
    limits = ("--goodput", "ttft:60000", "--slo-attainment", "0.9")
    result = nanoinfer("bench", *SMALL, "--sweep", "1,4", *limits, "-o", out)
    assert result.code == 0, result.err
    assert max(map(len, result.out.splitlines())) <= 80
    assert "fastest with ttft <= 60000 ms for 90% of its requests" in result.out
    document = json.loads(out.read_text())
    points = document["sweep"]["points"]
    assert [(p["max_concurrency"], p["max_concurrent_requests"], p["completed"]) for p in points] == [
        (1, 1, 8), (4, 4, 12),
    ]  # fmt: skip
    assert [p["prefix_cache"]["hits"] for p in points] == [0, 0]
    assert nanoinfer.llm.resets == 2
    assert document["device"]["name"] == "Fake CPU"
    impossible = nanoinfer("bench", *SMALL, "--sweep", "1,2", "--goodput", "ttft:0.0001", "--slo-attainment", "0.5")
    assert impossible.code == 4
    assert "no level kept ttft <= 0.0001 ms for 50%" in impossible.out


def test_an_interrupted_sweep_keeps_the_levels_that_are_done(nanoinfer: Program, tmp_path: Path) -> None:
    class Interrupted(FakeLLM):
        def reset_prefix_cache(self) -> None:
            super().reset_prefix_cache()
            if self.resets == 3:
                raise KeyboardInterrupt

    nanoinfer.make = Interrupted
    out = tmp_path / "sweep.json"
    result = nanoinfer("bench", *SMALL, "--sweep", "1,2,4", "-o", out)
    assert result.code == 130
    assert "interrupted: 2 of 3 levels are done" in result.err
    saved = json.loads(out.read_text())["sweep"]
    assert ([point["max_concurrency"] for point in saved["points"]], saved["complete"]) == ([1, 2], False)


def test_a_rate_sweep_sends_at_each_rate(nanoinfer: Program) -> None:
    result = bench(nanoinfer, *SMALL, "--sweep", "rate:300,600")
    assert [point["request_rate"] for point in result["sweep"]["points"]] == [300.0, 600.0]
    # The last of twelve requests arrives at 12 / rate.
    assert all(p["duration"] >= 12 / p["request_rate"] - 1e-6 for p in result["sweep"]["points"])


def test_a_comparison_with_an_earlier_result(nanoinfer: Program, tmp_path: Path) -> None:
    out = tmp_path / "old.json"
    bench(nanoinfer, *SMALL, "-o", out)
    result = nanoinfer("bench", *SMALL, "--compare", out, "--max-num-seqs", "2")
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert f"compared with {out}" in lines
    assert "  max_num_seqs: 256 -> 2" in lines
    assert any(line.split()[0] == "output_throughput" and line.split()[3].endswith("x") for line in lines if line)
    document = bench(nanoinfer, *SMALL, "--compare", out)
    assert set(document["compared"]["figures"]["p99_ttft_ms"]) == {"earlier", "now", "ratio", "verdict"}
    other = nanoinfer("bench", *SMALL, "--compare", out, "--seed", "5")
    assert other.code == 2
    assert "cannot be compared: its seed is 0, here it is 5" in " ".join(other.err.split())
    assert nanoinfer.llm.submitted == []  # refused before anything ran
    (tmp_path / "none.json").write_text("{}")
    assert "is not the result of a benchmark" in nanoinfer("bench", "--compare", tmp_path / "none.json").err
    for value in ('"x"', "NaN", "true"):
        (tmp_path / "none.json").write_text(f'{{"output_throughput": {value}}}')
        result = nanoinfer("bench", "--compare", tmp_path / "none.json")
        assert (result.code, nanoinfer.llm.submitted) == (2, [])
        assert "is damaged: its output_throughput is" in " ".join(result.err.split())
    missing = nanoinfer("bench", "--compare", tmp_path / "missing.json").err
    assert "missing.json: No such file or directory;" in "".join(missing.splitlines())


def test_a_result_of_vllms_own_benchmark_can_be_compared(nanoinfer: Program, tmp_path: Path) -> None:
    saved = {
        "date": "20260101-000000", "backend": "vllm", "model_id": "fake", "tokenizer_id": "fake", "num_prompts": 12,
        "request_rate": "inf", "burstiness": 1.0, "max_concurrency": None, "duration": 12.0, "completed": 12,
        "output_throughput": 1.0, "mean_ttft_ms": 1e6, "p99_ttft_ms": 1e6, "request_goodput": None,
    }  # fmt: skip
    path = tmp_path / "vllm.json"
    path.write_text(json.dumps(saved))
    figures = bench(nanoinfer, *SMALL, "--compare", path)["compared"]["figures"]
    assert {name: row["verdict"] for name, row in figures.items()} == dict.fromkeys(
        ("output_throughput", "mean_ttft_ms", "p99_ttft_ms"), "better"
    )
    path.write_text(json.dumps(saved | {"max_concurrency": 3}))
    assert "its max_concurrency is 3, here it is not set" in nanoinfer("bench", *SMALL, "--compare", path).err


def test_markdown_and_csv(nanoinfer: Program) -> None:
    markdown = nanoinfer("bench", *SMALL, "--format", "md").out
    assert "| machine | Fake CPU, 2 threads, 1.0 GiB" in markdown
    assert any(line.startswith("| TTFT | ") and line.count("|") == 7 for line in markdown.splitlines())
    [row] = csv.DictReader(io.StringIO(nanoinfer("bench", *SMALL, "--format", "csv").out))
    assert (row["completed"], row["engine.block_size"], row["request_rate"]) == ("12", "4", "inf")
    assert float(row["roofline.decode.fraction_of_copy"]) > 0
    rows = list(csv.DictReader(io.StringIO(nanoinfer("bench", *SMALL, "--sweep", "1,2", "--format", "csv").out)))
    assert [(row["sweep.over"], row["sweep.level"], row["max_concurrency"]) for row in rows] == [
        ("concurrency", "1", "1"), ("concurrency", "2", "2"),
    ]  # fmt: skip
    sweep = nanoinfer("bench", *SMALL, "--sweep", "1,2", "--format", "md").out
    assert sum(line.startswith(("| 1 |", "| 2 |")) for line in sweep.splitlines()) == 2


# -- warm-up on a GPU --------------------------------------------------------------------------------------------------


class OnGpu(FakeLLM):
    """Says that it runs on a GPU, and notes how many sequences decode in each step."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.info = replace(self.info, device="cuda")
        self.decodes: list[tuple[int, int]] = []  # (times that the cache was emptied, decoding sequences)
        self.own = self.events.subscribe()

    def step(self) -> Any:
        deltas = super().step()
        self.decodes += [(self.resets, event.decode_tokens) for event in self.own.drain()]
        return deltas


def test_the_warm_up_of_a_gpu_runs_every_batch_size_and_shows_how_far_it_is(
    nanoinfer: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    nanoinfer.make = OnGpu
    load = ("--device", "cuda", "--num-prompts", "12", "--input-len", "10", "--output-len", "3")
    said: list[str] = []
    monkeypatch.setattr(Console, "status", lambda self, text: said.append(text))
    bench(nanoinfer, *load, "--max-num-batched-tokens", "30", "--max-num-seqs", "20")
    shown = [int(line.split()[3]) for line in said if line.startswith("capturing CUDA graphs: ")]
    assert shown == sorted(shown)
    assert len({0, 12} & set(shown)) == 2
    assert len(set(shown)) > 8
    assert {count for resets, count in nanoinfer.llm.decodes if resets == 0} >= set(range(1, 13))
    result = bench(nanoinfer, *load, "--max-concurrency", "2")
    before = [count for resets, count in nanoinfer.llm.decodes if resets == 0]
    assert len(nanoinfer.llm.submitted) == 12 + 4 + 12  # four as the load will be sent, two at a time
    assert before.count(2) > 3
    assert result["completed"] == 12
    assert nanoinfer.llm.resets == 1

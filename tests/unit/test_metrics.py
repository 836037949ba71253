"""Latencies, rates, windows and goodput, from made-up step events with hand-computed answers."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from nanoinfer.engine import metrics as metrics_module
from nanoinfer.engine.events import FinishedSequence, RequestTiming, StepEvent
from nanoinfer.engine.latency import SLO, Distribution, distribution, gaps_ms, latencies_ms, parse_slos
from nanoinfer.engine.metrics import Metrics
from nanoinfer.errors import ConfigError

EVENT = StepEvent(
    step=0,
    time=0.0,
    kind="decode",
    running=1,
    waiting=0,
    prefill_tokens=0,
    decode_tokens=0,
    cached_tokens=0,
    prompt_tokens=0,
    blocks_active=0,
    blocks_cached=0,
    blocks_free=0,
    evictions=0,
    preemptions=0,
    emitted=(),
    finished=(),
    schedule_ms=0.0,
    device_ms=0.0,
    step_ms=0.0,
)


def event(at: float, **changes: Any) -> StepEvent:
    return replace(EVENT, time=at, **changes)


def finished(*token_times: float, arrival: float = 0.0, reason: str = "stop", **changes: Any) -> FinishedSequence:
    timing = RequestTiming(
        arrival=arrival,
        first_scheduled=arrival + 0.01,
        first_token=token_times[0] if token_times else None,
        last_token=token_times[-1] if token_times else None,
        finished=token_times[-1] if token_times else arrival,
    )
    sequence = FinishedSequence(
        request_id="r",
        index=0,
        reason=reason,
        prompt_tokens=10,
        cached_tokens=0,
        output_tokens=len(token_times),
        preemptions=0,
        timing=timing,
        token_times=token_times,
    )
    return replace(sequence, **changes)


def metrics_of(*sequences: FinishedSequence, slos: str = "") -> Metrics:
    metrics = Metrics(parse_slos(slos))
    metrics.observe(event(10.0, step_ms=10_000.0, finished=sequences))
    return metrics


# -------------------------------------------------------------------------------------------------- one sequence


def test_latencies_of_a_sequence() -> None:
    sequence = finished(1.2, 1.25, 1.4, arrival=1.0)
    expected = {"ttft": 200, "tpot": 100, "e2e": 400, "queue": 10, "prefill": 190}
    assert latencies_ms(sequence) == pytest.approx(expected)
    assert gaps_ms(sequence) == pytest.approx([50, 150])


def test_one_token_has_a_ttft_and_no_tpot() -> None:
    sequence = finished(1.2, arrival=1.0)
    found = latencies_ms(sequence)
    assert found["ttft"] == found["e2e"] == pytest.approx(200)
    assert found["tpot"] is None
    assert len(gaps_ms(sequence)) == 0


def test_aborted_before_the_first_token_has_no_latencies() -> None:
    found = latencies_ms(finished(arrival=1.0, reason="abort"))
    assert found.pop("queue") == pytest.approx(10)
    assert set(found.values()) == {None}


gaps = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=30)


@settings(max_examples=examples(20), deadline=None)
@given(st.floats(0, 1e6), gaps)
def test_e2e_is_ttft_plus_tpot_times_the_gaps_exactly(arrival: float, times: list[float]) -> None:
    sequence = finished(*(arrival + np.cumsum(times)).tolist(), arrival=arrival)
    found = latencies_ms(sequence)
    ttft, tpot, e2e = found["ttft"], found["tpot"], found["e2e"]
    assert ttft is not None
    assert e2e == pytest.approx(ttft + (tpot or 0.0) * (sequence.output_tokens - 1), rel=1e-9)
    if tpot is not None:
        assert tpot == pytest.approx(gaps_ms(sequence).mean(), rel=1e-6)


# -------------------------------------------------------------------------------------------------- distributions


@settings(max_examples=examples(20), deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 5)), max_size=40))
def test_percentiles_equal_numpys_linear_method(pairs: list[tuple[float, int]]) -> None:
    values, weights = [value for value, _ in pairs], [weight for _, weight in pairs]
    for result, flat in (
        (distribution(values), values),
        (distribution(values, weights), np.repeat(values, weights).tolist()),
    ):
        if not flat:
            assert result is None
            continue
        assert result is not None
        assert result.count == len(flat)
        expected = [np.mean(flat), *np.percentile(flat, [50, 90, 99])]
        assert [result.mean, result.p50, result.p90, result.p99] == pytest.approx(expected, rel=1e-9)


def test_percentiles_of_one_to_a_hundred() -> None:
    assert distribution(range(101)) == Distribution(101, 50.0, 50.0, 90.0, 99.0)


# -------------------------------------------------------------------------------------------------- SLOs and goodput


def test_slos_are_read_from_words() -> None:
    expected = (SLO("ttft", 200.0), SLO("itl_p99", 7.5))
    assert parse_slos("ttft:200  itl_p99:7.5") == expected
    assert parse_slos("") == ()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("ttft", "must be METRIC:MILLISECONDS"),
        ("tftt:3", "unknown SLO 'tftt'; did you mean 'ttft'"),
        ("ttft:fast", "needs a number of milliseconds"),
        ("ttft:0", "needs a number of milliseconds above 0"),
        ("ttft:nan", "needs a number"),
        ("ttft:inf", "needs a number"),
        ("ttft:1 ttft:2", "'ttft' is given twice"),
    ],
)
def test_bad_slo_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_slos(text)


def test_goodput_counts_what_kept_every_slo_over_all_that_was_attempted() -> None:
    metrics = metrics_of(
        finished(0.1, 0.15),  # good
        finished(0.1, 0.30),  # TPOT too long
        finished(0.3, 0.35),  # TTFT too long
        finished(0.1),  # one token: no TPOT, good
        finished(0.1, 0.15, reason="error"),
        finished(0.1, 0.15, reason="abort"),
        finished(0.1, 0.15, reason="length"),  # good
        slos="ttft:200 tpot:100",
    )
    snapshot = metrics.snapshot()
    assert (snapshot.succeeded, snapshot.failed, snapshot.aborted) == (5, 1, 1)
    goodput = snapshot.goodput
    assert (goodput.good, goodput.attempted, goodput.met) == (3, 7, (4, 4))
    assert goodput.attainment == 3 / 7
    assert goodput.per_second == pytest.approx(0.3)


@pytest.mark.parametrize(("slo", "good"), [("e2el:160", 1), ("e2el:140", 0), ("itl_p99:50", 1), ("itl_p99:48", 0)])
def test_every_slo_has_its_own_figure(slo: str, good: int) -> None:
    # itl_p99 of gaps 0, 49.5 at the 99th percentile: between the two values, not the maximum
    sequence = finished(0.1, 0.1, 0.15)
    assert metrics_of(sequence, slos=slo).snapshot().goodput.good == good
    assert metrics_of(replace(sequence, reason="error"), slos=slo).snapshot().goodput.met == (0,)


def test_without_slos_every_success_is_good_and_nothing_is_attained_before_the_end() -> None:
    assert metrics_of(finished(0.1), finished(0.2, reason="error")).snapshot().goodput.attainment == 0.5
    assert Metrics().snapshot().goodput.attainment is None


def test_samples_of_a_request_are_measured_each() -> None:
    metrics = metrics_of(finished(0.1, 0.2), finished(0.1, 0.4, index=1))
    assert [sequence.timing.e2e_ms for sequence in metrics.sequences] == pytest.approx([200, 400])
    assert metrics.snapshot().goodput.attempted == 2


# -------------------------------------------------------------------------------------------------- totals and windows


def test_totals_of_the_run() -> None:
    metrics = Metrics()
    metrics.observe(
        event(
            1.0,
            step_ms=500.0,
            schedule_ms=2.0,
            device_ms=450.0,
            prefill_tokens=60,
            prompt_tokens=100,
            cached_tokens=40,
            blocks_active=9,
            emitted=(("a", 1), ("b", 1)),
        )
    )
    metrics.observe(
        event(
            2.5,
            step_ms=1500.0,
            schedule_ms=1.0,
            device_ms=900.0,
            decode_tokens=2,
            prompt_tokens=60,
            emitted=(("a", 1), ("b", 2)),
            preemptions=1,
            evictions=3,
            running=2,
            waiting=5,
            blocks_active=7,
            blocks_cached=2,
            blocks_free=1,
            used_graph=True,
        )
    )
    snapshot = metrics.snapshot()
    run = snapshot.run
    assert (run.steps, run.graph_steps, run.prefill_tokens, run.decode_tokens, run.output_tokens) == (2, 1, 60, 2, 5)
    assert (run.preemptions, run.evictions) == (1, 3)
    assert (run.schedule_ms, run.device_ms, run.step_ms) == (3.0, 1350.0, 2000.0)
    assert run.hit_ratio == 0.25
    assert run.seconds == pytest.approx(2.0), "from the beginning of the first step"
    assert [run.prefill_tokens_per_s, run.decode_tokens_per_s, run.output_tokens_per_s] == pytest.approx([30, 1, 2.5])
    assert (snapshot.running, snapshot.waiting) == (2, 5)
    assert (snapshot.blocks_active, snapshot.blocks_cached, snapshot.blocks_free) == (7, 2, 1)
    assert snapshot.peak_blocks_active == 9
    assert snapshot.window == run


def test_requests_that_end_between_steps_do_not_lower_the_mean_step_time() -> None:
    metrics = Metrics()
    metrics.observe(event(1.0, step_ms=20.0, emitted=(("a", 1),)))
    metrics.observe(event(1.5, kind="idle", finished=(finished(1.0, reason="abort"),)))
    snapshot = metrics.snapshot()
    assert (snapshot.run.steps, snapshot.run.step_ms, snapshot.aborted) == (1, 20.0, 1)


def test_snapshot_before_the_first_step_is_empty() -> None:
    snapshot = Metrics().snapshot()
    assert snapshot.run.hit_ratio is None
    assert snapshot.run.output_tokens_per_s == 0.0
    assert Metrics().window_latencies().ttft is None
    assert snapshot.decode_history == ()


def test_window_forgets_what_is_older_than_a_minute_and_the_run_does_not() -> None:
    metrics = Metrics()
    metrics.observe(event(0.5, prompt_tokens=10, cached_tokens=10, decode_tokens=4, finished=(finished(0.2, 0.4),)))
    metrics.observe(event(30.0, prompt_tokens=10, decode_tokens=1, finished=(finished(29.2, 30.0, arrival=29.0),)))
    both = metrics.snapshot(now=59.0)
    assert both.window.hit_ratio == both.run.hit_ratio == 0.5
    assert both.window.seconds == pytest.approx(58.5)
    e2e = metrics.window_latencies(59.0).e2e
    assert e2e is not None
    assert e2e.count == 2
    later = metrics.snapshot(now=70.0)
    assert (later.window.hit_ratio, later.run.hit_ratio) == (0.0, 0.5)
    assert (later.window.decode_tokens, later.run.decode_tokens) == (1, 5)
    assert later.window.seconds == pytest.approx(60.0), "idle time counts"
    assert (later.recent.decode_tokens, metrics.snapshot(now=39.9).recent.decode_tokens) == (0, 1)
    assert (later.recent.seconds, metrics.snapshot(now=39.9).recent.seconds) == pytest.approx((10.0, 10.9))
    e2e = metrics.window_latencies(70.0).e2e
    assert e2e is not None
    assert e2e.p50 == pytest.approx(1000.0)
    assert metrics.window_latencies(200.0).e2e is None
    run = metrics.run_latencies()
    assert run.ttft is not None
    assert run.ttft.count == 2


def test_window_ttft_is_there_with_the_first_token_and_counts_it_once() -> None:
    metrics = Metrics()
    metrics.observe(event(0.5, first_tokens=(("a", 0.3), ("b", 0.1))))
    ttft = metrics.window_latencies().ttft
    assert ttft is not None, "nobody has ended"
    assert (ttft.count, ttft.mean) == (2, pytest.approx(300.0))
    assert metrics.run_latencies().ttft is None, "a report counts those that succeeded"
    metrics.observe(event(0.9, finished=(finished(0.5, 0.9, arrival=0.3), finished(0.5, arrival=0.1, reason="abort"))))
    assert metrics.window_latencies().ttft == ttft
    run = metrics.run_latencies().ttft
    assert run is not None
    assert (run.count, run.mean) == (1, pytest.approx(200.0))
    assert metrics.window_latencies(200.0).ttft is None


def test_run_latencies_are_over_all_gaps_of_all_that_succeeded() -> None:
    latencies = metrics_of(
        finished(0.1, 0.2, 0.4), finished(0.3, 0.4), finished(0.1, 9.0, reason="abort"), finished(0.2)
    ).run_latencies()
    assert latencies.itl is not None
    assert (latencies.itl.count, latencies.itl.p50) == (3, pytest.approx(100))
    assert latencies.tpot is not None
    assert (latencies.tpot.count, latencies.tpot.mean) == (2, pytest.approx(125))
    assert latencies.ttft is not None
    assert latencies.ttft.count == 3
    assert Metrics().run_latencies().itl is None


def test_window_itl_counts_each_decoding_sequence_and_no_idle_time() -> None:
    metrics = Metrics()
    a, b = ("a", 1), ("b", 1)
    metrics.observe(event(1.00, kind="prefill", emitted=(a,)))
    metrics.observe(event(1.02, decode_tokens=1, emitted=(a,)))
    metrics.observe(event(1.50, kind="prefill", emitted=(b,), running=2))  # stalls a
    metrics.observe(event(1.52, decode_tokens=2, emitted=(a, b), running=0))
    metrics.observe(event(9.00, kind="prefill", emitted=(a,)))
    metrics.observe(event(9.04, decode_tokens=1, emitted=(a,)))
    itl = metrics.window_latencies().itl
    assert itl is not None
    # 20 ms once, 500 ms for the two that decode after the stall, 40 ms after the idle time
    assert (itl.count, itl.mean) == (4, pytest.approx((20 + 500 + 500 + 40) / 4))


def test_history_has_a_value_for_every_whole_second() -> None:
    metrics = Metrics(window_s=4)
    for at, tokens in (0.2, 5), (0.9, 5), (3.1, 7), (4.5, 100):
        metrics.observe(event(at, decode_tokens=tokens, prefill_tokens=2 * tokens))
    assert metrics.snapshot().decode_history == (10, 0, 0, 7), "the second under way is left out"
    assert metrics.snapshot().prefill_history == (20, 0, 0, 14)
    assert metrics.snapshot(now=6.0).decode_history == (0, 7, 100, 0)


def test_without_the_sequences_the_sums_are_the_same_and_the_memory_is_bounded() -> None:
    ended = (finished(0.2, 0.4), finished(0.1, reason="error"))
    kept, bounded = Metrics((SLO("ttft", 150.0),)), Metrics((SLO("ttft", 150.0),), keep_sequences=False)
    for metrics in (kept, bounded):
        metrics.observe(event(1.0, finished=ended, first_tokens=(("r", 0.0),)))
    assert bounded.snapshot() == kept.snapshot()
    assert bounded.window_latencies() == kept.window_latencies()
    assert bounded.snapshot().goodput.attempted == 2
    assert bounded.sequences == []


def test_memory_of_the_window_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "MAX_WINDOW_STEPS", 100)
    metrics = Metrics(window_s=5)
    for step in range(2000):
        metrics.observe(event(step * 0.01, decode_tokens=1))
    itl = metrics.window_latencies().itl
    assert itl is not None
    assert itl.count == 100
    assert len(metrics._seconds) <= 6


def test_observing_a_step_of_256_sequences_is_cheap() -> None:
    metrics = Metrics()
    step = event(1.0, decode_tokens=256, emitted=tuple((f"request-{i}", 1) for i in range(256)), running=256)
    rounds = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(50):
            metrics.observe(step)
        rounds.append((time.perf_counter() - start) / 50)
    assert min(rounds) < 60e-6, "20 us on an idle machine; three times that leaves room for a busy one"

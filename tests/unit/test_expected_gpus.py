"""The model behind benchmarks/expected_gpus.py finds the constants of a machine that obeys it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def expected():
    path = Path(__file__).parents[2] / "benchmarks" / "expected_gpus.py"
    spec = importlib.util.spec_from_file_location("expected_gpus", path)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def truth(expected):
    return expected.Model(
        expected.Constants(
            bandwidth=3.3e12, product=500e12, attention=200e12, fixed_one=5e-6, fixed_many=22e-6, latency=21e-6,
            link=90e9,
        )
    )  # fmt: skip


def measurements(expected, model, noise=lambda i: 1.0):
    results = []
    for name, shape in expected.SHAPES.items():
        for tp in (1, 2):
            for part in expected.WORKLOADS:
                value = model.predict(part, shape, tp) * noise(len(results))
                results.append({"part": part, "shape": name, "tp": tp, "median": value, "unit": "any"})
    return results


def largest_error(expected, model, truth):
    return max(
        abs(model.predict(part, shape, tp) / truth.predict(part, shape, tp) - 1)
        for shape in expected.SHAPES.values()
        for part in expected.WORKLOADS
        for tp in (1, 2, 4, 8)
    )


def test_exact_measurements_give_the_constants_back(expected, truth):
    model = expected.fit(expected.read_rows(measurements(expected, truth)))
    assert vars(model.constants) == pytest.approx(vars(truth.constants), rel=0.02)
    assert largest_error(expected, model, truth) < 0.005


def test_measurements_that_are_off_by_a_few_percent_are_smoothed(expected, truth):
    results = measurements(expected, truth, noise=lambda i: 1.03 if i % 2 else 0.97)
    assert largest_error(expected, expected.fit(expected.read_rows(results)), truth) < 0.15


def test_a_sweep_of_all_reduces_is_taken_where_there_is_one(expected, truth):
    """Steps of 2 ranks take what was measured, more ranks as much more as the formula says."""
    sizes = [1 << i for i in range(11, 27)]
    sweep = [
        {"part": "allreduce", "tp": 2, "what": "all_reduce", "bytes": n, "us": 1e6 * truth.formula(2, n)} for n in sizes
    ]
    gather = {"part": "allreduce", "tp": 2, "what": "all_gather", "bytes": 8, "us": 1.0}
    model = expected.fit(expected.read_rows([*measurements(expected, truth), *sweep, gather]))
    assert len(model.sweep) == len(sizes)
    assert model.all_reduce(2, 4096.0) == pytest.approx(truth.formula(2, 4096.0), rel=1e-6)
    assert model.all_reduce(8, 4096.0) == pytest.approx(truth.formula(8, 4096.0), rel=0.02)
    assert largest_error(expected, model, truth) < 0.03


def test_lengths_are_those_of_the_benchmark(expected):
    prompts, outputs = expected.bench256_lengths()
    assert (sum(prompts), sum(outputs)) == (142_827, 133_966)
    batch, context = expected.bench256_steps()
    assert batch.sum() == sum(outputs) - 256
    assert context[0] == sum(prompts) + 256


def test_rows_without_shape_and_ranks_are_what_the_caller_says(expected):
    rows = expected.read_rows([{"part": "decode 1/128", "median": 2.0}, {"part": "machine"}], "8b", 2)
    assert rows == [expected.Row("decode 1/128", "8b", 2, 2.0)]
    assert "| 8b | decode 1/128, ms | " in expected.table(expected.Model(expected.Constants()), rows, [1, 2])

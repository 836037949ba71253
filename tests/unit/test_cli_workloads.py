"""Benchmark workloads: seeds that give the same requests every time."""

from __future__ import annotations

import statistics
from collections import Counter

import pytest

from nanoinfer.cli.lengths import LengthRange
from nanoinfer.cli.workloads import arrival_times, check_fits, prefix_requests, with_arrivals
from nanoinfer.errors import UserError


@pytest.mark.parametrize(("given", "low", "high"), [("512", 512, 512), ("100:1024", 100, 1024), (7, 7, 7)])
def test_lengths(given: str | int, low: int, high: int) -> None:
    assert LengthRange.parse(given) == LengthRange(low, high)


@pytest.mark.parametrize("given", ["x", "5:", "9:3", "0", "1:2:3"])
def test_bad_lengths(given: str) -> None:
    with pytest.raises(ValueError, match=r"must be at least 1|is not a length"):
        LengthRange.parse(given)


def test_random_requests_stay_in_range_and_repeat_with_their_seed() -> None:
    inputs, outputs = LengthRange(5, 9), LengthRange(3, 3)
    requests = prefix_requests(50, 1, 0, inputs, outputs, 100, seed=1)
    assert requests == prefix_requests(50, 1, 0, inputs, outputs, 100, seed=1)
    assert requests != prefix_requests(50, 1, 0, inputs, outputs, 100, seed=2)
    assert {len(request.token_ids) for request in requests} == {5, 6, 7, 8, 9}
    assert all(request.output_tokens == 3 and max(request.token_ids) < 100 for request in requests)


def test_prefix_requests_share_their_prefixes() -> None:
    requests = prefix_requests(12, 3, 20, LengthRange(4, 4), LengthRange(1, 1), 1000, seed=0)
    prefixes = {tuple(request.token_ids[:20]) for request in requests}
    suffixes = {tuple(request.token_ids[20:]) for request in requests}
    assert (len(prefixes), len(suffixes)) == (3, 12)


def test_prompts_that_cannot_be_shared_out_evenly_are_all_there() -> None:
    requests = prefix_requests(14, 4, 20, LengthRange(4, 4), LengthRange(1, 1), 1000, seed=0)
    groups = Counter(tuple(request.token_ids[:20]) for request in requests)
    assert sorted(groups.values()) == [3, 3, 4, 4]


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 20.0])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    times = arrival_times(4000, 8.0, burstiness, seed=0)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(500.0)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    variation = statistics.stdev(gaps) / statistics.mean(gaps)
    assert variation == pytest.approx(burstiness**-0.5, rel=0.1)


def test_an_infinite_rate_has_no_arrival_times() -> None:
    requests = prefix_requests(3, 1, 0, LengthRange(2, 2), LengthRange(2, 2), 10, seed=0)
    assert with_arrivals(requests, float("inf"), 1.0, 0) is requests
    assert all(request.arrival is not None for request in with_arrivals(requests, 2.0, 1.0, 0))


def test_requests_that_cannot_fit_are_refused_with_the_numbers() -> None:
    requests = prefix_requests(3, 1, 0, LengthRange(90, 90), LengthRange(20, 20), 10, seed=0)
    check_fits(requests, 110)
    with pytest.raises(UserError, match=r"has 110 tokens.*takes 100"):
        check_fits(requests, 100)

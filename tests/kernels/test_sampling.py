"""Sampling kernels against the torch twins: greedy ties, equal noise, shards, top-k / top-p / min-p with ties."""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import normal

from nanoinfer.kernels import keep_bounds, reference, sampling
from nanoinfer.kernels.triton_set import TritonKernels

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:divide by zero:RuntimeWarning"
)  # the interpreter's numpy: the hash wraps on purpose, and log(0) is part of the race


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(sampling, "PART", 256)
    monkeypatch.setattr(sampling, "CANDIDATES", 4)
    monkeypatch.setattr(keep_bounds, "BLOCK", 256)


def row_parameters(batch, device):
    temperatures = torch.tensor([0.0, 0.6, 1.0, 2.0] * batch, device=device)[:batch]
    seeds = torch.tensor([1, -5, 2**40 + 3, 7] * batch, device=device)[:batch]
    return temperatures, seeds, torch.arange(batch, device=device) * 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_race_is_the_twins_race(dtype, device):
    logits = normal(8, 2000, dtype=dtype, device=device) * 3
    parameters = row_parameters(8, device)
    ids, scores = sampling.best(logits, *parameters)
    assert ids.tolist() == reference.sample(logits.float(), *parameters).tolist()
    assert scores[0] == logits[0].max()


def test_the_kernel_set_draws_the_twins_tokens_with_its_own_kernel(monkeypatch, device):
    logits = normal(8, 2000, dtype=torch.float32, device=device) * 3
    parameters = row_parameters(8, device)
    expected = reference.sample(logits, *parameters).tolist()
    monkeypatch.setattr(reference, "best", None)  # the twin takes thirty times as long on a GPU
    assert TritonKernels().sample(logits, *parameters).tolist() == expected


def test_greedy_takes_the_lowest_id_of_equal_logits(device):
    logits = torch.zeros(1, 2000, device=device)
    logits[0, [300, 999, 1999]] = 5.0
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    assert sampling.best(logits, zero.float(), zero, zero)[0].item() == 300


def test_a_row_of_nan_names_a_token_that_exists(device):
    logits = torch.full((1, 600), float("nan"), device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    assert 0 <= sampling.best(logits, zero.float(), zero, zero)[0].item() < 600


def test_shards_of_the_vocabulary_race_each_other_fairly(device):
    logits = normal(4, 1000, dtype=torch.float32, device=device)
    parameters = row_parameters(4, device)
    whole, _ = sampling.best(logits, *parameters)
    parts = [sampling.best(logits[:, a:b], *parameters, first_id=a) for a, b in [(0, 400), (400, 1000)]]
    scores = torch.stack([score for _, score in parts])
    ids = torch.stack([ids for ids, _ in parts])
    assert ids.gather(0, scores.argmax(dim=0, keepdim=True))[0].tolist() == whole.tolist()


def kept(logits, temperatures, top_k, top_p, min_p):
    thresholds, cutoffs = keep_bounds.keep_bounds(logits, temperatures, top_k, top_p, min_p)
    ids = torch.arange(logits.shape[1], device=logits.device)[None, :]
    wide = logits.float()
    return (wide > thresholds[:, None]) | ((wide == thresholds[:, None]) & (ids <= cutoffs[:, None]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("k", "p", "m"),
    [
        (0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (40, 0.7, 0.0), (0, 1.0, 0.05), (3, 0.95, 0.2), (1, 0.1, 0.0),
        (0, 0.0, 0.0),
    ],
)  # fmt: skip
def test_bounds_keep_what_the_sorted_twin_keeps(k, p, m, dtype, device):
    # Coarse values, so that many logits are equal where the cut falls.
    logits = (normal(3, 700, dtype=torch.float32, device=device) * 4).round().div(4).to(dtype)
    rows = logits.shape[0]
    temperatures = torch.tensor([0.0, 0.7, 1.5], device=device)
    parameters = [torch.full((rows,), value, device=device) for value in (k, p, m)]
    expected = reference.mask_unlikely(logits.float(), temperatures, *parameters).isfinite()
    actual = kept(logits, temperatures, *parameters)
    assert actual.sum(dim=1).tolist() == expected.sum(dim=1).tolist()
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(("k", "p"), [(5, 1.0), (0, 0.9), (600, 0.99)])
def test_forbidden_tokens_are_not_counted(k, p, device):
    """Rows in which most logits are -inf (min_tokens, a grammar), fewer left than top-k asks for."""
    logits = torch.full((2, 700), float("-inf"), device=device)
    logits[0, [3, 650]] = torch.tensor([1.0, 1.5], device=device)
    logits[1, 100:400] = normal(300, dtype=torch.float32, device=device)
    ones = torch.ones(2, device=device)
    parameters = (ones, (ones * k).int(), ones * p, ones * 0)
    expected = reference.mask_unlikely(logits, *parameters).isfinite()
    assert torch.equal(kept(logits, *parameters) & logits.isfinite(), expected)


def test_top_p_keeps_the_token_that_crosses(device):
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]], device=device).log()
    one = torch.ones(1, device=device)
    assert kept(logits, one, one.int() * 0, one * 0.6, one * 0).tolist() == [[False, False, True, True]]


def test_bounds_apply_in_the_race_row_by_row(device):
    logits = normal(3, 700, dtype=torch.float32, device=device)
    temperatures = torch.tensor([5.0, 5.0, 5.0], device=device)
    top_k = torch.tensor([1, 0, 3], device=device)
    top_p = torch.tensor([1.0, 1e-6, 1.0], device=device)
    bounds = keep_bounds.keep_bounds(logits, temperatures, top_k, top_p, torch.zeros(3, device=device))
    best = logits.topk(3).indices.tolist()
    for seed in range(3):
        seeds = torch.full((3,), seed, device=device)
        ids, _ = sampling.best(logits, temperatures, seeds, seeds, bounds)
        assert ids[0] == best[0][0]
        assert ids[1] == best[1][0]
        assert int(ids[2]) in best[2]

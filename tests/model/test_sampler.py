"""The sampler rule by rule, with its real tables: every row gets what it asks for, whoever its neighbours are."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from nanoinfer.config import SamplingParams
from nanoinfer.engine.batch import NewSequence, ScheduledBatch, TokenLogprobs
from nanoinfer.kernels import reference
from nanoinfer.kernels.kernel_set import EAGER, KernelSet
from nanoinfer.runner import sampler as sampler_module
from nanoinfer.runner.input_batch import SequenceRows
from nanoinfer.runner.sampler import Sampler
from nanoinfer.runner.sampling_table import SamplingTable

MAX_LEN, VOCAB = 64, 32
PROBABILITIES = [0.1, 0.2, 0.3, 0.4]
CPU = torch.device("cpu")


@dataclass
class Request:
    """One row of a step: `output` is what it has generated so far."""

    logits: torch.Tensor
    seed: int = 0
    prompt: list[int] = field(default_factory=lambda: [1])
    output: list[int] = field(default_factory=list)
    stop_token_ids: tuple[int, ...] = ()
    params: SamplingParams = field(default_factory=SamplingParams)


def request(logits, seed=0, prompt=(1,), output=(), stop_token_ids=(), **params) -> Request:
    options = SamplingParams(max_tokens=None, **params)
    return Request(torch.as_tensor(logits).float(), seed, list(prompt), list(output), stop_token_ids, options)


def batch_of(new: list[NewSequence]) -> ScheduledBatch:
    """A step that computes all known tokens of these sequences."""
    rows, lengths = [s.row for s in new], [len(s.token_ids) for s in new]
    return ScheduledBatch(0, new, [], rows, [0] * len(new), lengths, [True] * len(new), 0)


def step(requests: list[Request], kernels: KernelSet = EAGER) -> tuple[list[int], list[TokenLogprobs | None] | None]:
    """Sample once for requests that lie in rows of another order, whose rest an earlier owner left full of token 3."""
    rows, table = SequenceRows(len(requests) + 2, MAX_LEN, 16), SamplingTable(len(requests) + 2)
    rows.token_ids[:] = 3
    order = [len(requests) + 1 - i for i in range(len(requests))]
    new = [
        NewSequence(row, r.prompt + r.output, len(r.prompt), [0, 1, 2, 3], r.params, r.seed, r.stop_token_ids)
        for row, r in zip(order, requests, strict=True)
    ]
    rows.update(batch_of(new))
    table.update(batch_of(new))
    lengths = [len(s.token_ids) for s in new]
    logits = torch.stack([r.logits for r in requests])
    sampled = Sampler(table, rows, kernels, CPU).sample(logits, np.array(order), np.array(lengths))
    return sampled.token_ids.tolist(), sampled.logprobs


def draw(requests: list[Request]) -> list[int]:
    return step(requests)[0]


def logits_of(seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 2


def counts(logits, draws: int = 4000, first_seed: int = 0, **params) -> torch.Tensor:
    """How often each token is drawn by `draws` different seeds."""
    tokens = draw([request(logits, seed=first_seed + i, **params) for i in range(draws)])
    return torch.bincount(torch.tensor(tokens), minlength=len(logits))


def assert_follows(observed: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Chi-square of the tokens that can occur, below its mean by six standard deviations; the others never occur."""
    possible = probabilities > 0
    assert observed[~possible].sum() == 0
    expected = probabilities[possible].double() * observed.sum()
    statistic = ((observed[possible] - expected).square() / expected).sum().item()
    freedom = int(possible.sum()) - 1
    assert statistic < freedom + 6 * math.sqrt(2 * freedom) + 1, (statistic, observed, expected)


# ---- greedy and temperature ------------------------------------------------------------------------------------------


def test_temperature_0_is_argmax_and_draws_no_noise(monkeypatch):
    def no_noise(*_):
        raise AssertionError("greedy rows need no random numbers")

    monkeypatch.setattr(reference, "exponential_noise", no_noise)
    before = torch.random.get_rng_state()
    rows = [logits_of(i) for i in range(8)]
    expected = [int(r.argmax()) for r in rows]
    assert draw([request(r, temperature=0.0) for r in rows]) == expected
    # Filters and logprobs do not make a greedy row random.
    assert draw([request(r, temperature=0.0, top_k=5, top_p=0.5, min_p=0.1, logprobs=1) for r in rows]) == expected
    assert torch.equal(torch.random.get_rng_state(), before)


def test_greedy_row_beside_a_random_one_is_exact():
    rows = [logits_of(i) for i in range(20)]
    tokens = draw([request(r, seed=i, temperature=0.0 if i % 2 else 5.0) for i, r in enumerate(rows)])
    assert tokens[1::2] == [int(r.argmax()) for r in rows[1::2]]


def test_greedy_takes_the_first_of_equal_logits_in_any_batch():
    tied = torch.zeros(VOCAB)
    tied[[5, 9, 30]] = 4.0
    assert draw([request(tied, temperature=0.0)]) == [5]
    assert draw([request(tied, temperature=0.0), request(tied, temperature=1.0)])[0] == 5


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_draws_follow_the_distribution_at_the_temperature(temperature):
    logits = logits_of(3, vocab=8)
    assert_follows(counts(logits, temperature=temperature), (logits / temperature).softmax(-1))


def test_draws_of_one_seed_along_its_output_follow_the_distribution():
    logits = logits_of(4, vocab=8)
    tokens = [draw([request(logits, seed=7, prompt=[1], output=[2] * i)])[0] for i in range(60)]
    assert len(set(tokens)) > 1
    indices = torch.arange(4000)
    ones = torch.ones(4000)
    many = reference.sample(logits.expand(4000, -1), ones, ones.long() * 7, indices)
    assert many[:60].tolist() == tokens
    assert_follows(torch.bincount(many, minlength=8), logits.softmax(-1))


def test_plain_rows_beside_one_with_logprobs_are_drawn_by_the_kernel_set():
    """They once went through the torch twin, which on a GPU takes milliseconds for a large batch."""

    class Counting(KernelSet):
        drawn = 0

        def sample(self, logits, *parameters):
            self.drawn += len(logits)
            return super().sample(logits, *parameters)

    kernels, requests = Counting(), [request(logits_of(i), seed=i) for i in range(6)]
    alone = draw(requests)
    requests[2] = request(logits_of(2), seed=2, logprobs=1)
    assert step(requests, kernels)[0] == alone
    assert kernels.drawn == 6


@pytest.mark.parametrize("options", [{"temperature": 0.0, "logprobs": 1}, {"logprobs": 1}, {"top_k": 3}])
def test_rows_of_one_kind_are_drawn_without_a_copy_of_the_logits(options, monkeypatch):
    seen = []
    original = Sampler._draw
    monkeypatch.setattr(
        Sampler, "_draw", lambda self, logits, *rest: seen.append(logits) or original(self, logits, *rest)
    )
    table, rows = SamplingTable(3), SequenceRows(3, MAX_LEN, 16)
    params = SamplingParams(max_tokens=None, **options)
    table.update(batch_of([NewSequence(row, [1], 1, [0], params, row, ()) for row in range(3)]))
    logits = torch.stack([logits_of(i) for i in range(3)])
    Sampler(table, rows, EAGER, CPU).sample(logits, np.arange(3), np.ones(3, np.int64))
    assert [each.data_ptr() for each in seen] == [logits.data_ptr()]


def test_almost_zero_temperature_is_not_nan():
    logits = logits_of(5)
    for temperature in (1e-30, 1e-40, 1e-300):
        for options in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}):
            assert draw([request(logits, temperature=temperature, **options)]) == [int(logits.argmax())]


# ---- top-k, top-p, min-p ---------------------------------------------------------------------------------------------


def kept(probabilities: list[float], **params) -> set[int]:
    """The tokens that 400 seeds draw: those that are left are so likely that none is missed."""
    observed = counts(torch.tensor(probabilities).log(), draws=400, **params)
    return set(observed.nonzero().flatten().tolist())


def test_top_p_keeps_the_token_that_crosses_p():
    assert kept(PROBABILITIES, top_p=0.6) == {2, 3}
    assert kept(PROBABILITIES, top_p=0.39) == {3}
    assert kept(PROBABILITIES, top_p=0.71) == {1, 2, 3}


def test_top_p_renormalises_what_is_left():
    assert_follows(counts(torch.tensor(PROBABILITIES).log(), top_p=0.6), torch.tensor([0.0, 0.0, 3 / 7, 4 / 7]))


def test_top_p_is_of_the_distribution_at_the_temperature():
    # At temperature 2 the probabilities are like .163 .230 .282 .325, so that three tokens are needed for .7.
    assert kept(PROBABILITIES, top_p=0.68) == {2, 3}
    assert kept(PROBABILITIES, top_p=0.68, temperature=2.0) == {1, 2, 3}


def test_top_k_keeps_the_k_most_likely():
    assert kept(PROBABILITIES, top_k=3) == {1, 2, 3}
    assert kept(PROBABILITIES, top_k=1) == {3}
    assert kept(PROBABILITIES, top_k=99) == {0, 1, 2, 3}
    assert_follows(counts(torch.tensor(PROBABILITIES).log(), top_k=3), torch.tensor([0.0, 2, 3, 4]) / 9)


def test_top_k_keeps_no_more_than_k_of_equal_tokens():
    assert kept([0.25] * 4, top_k=2) == {0, 1}


def test_top_p_counts_what_top_k_left():
    # Of .4 and .3 the first alone is 4/7 = .571 of what top-k 2 leaves, though .4 of the whole.
    assert kept(PROBABILITIES, top_k=2, top_p=0.5) == {3}
    assert kept(PROBABILITIES, top_p=0.5) == {2, 3}
    assert kept(PROBABILITIES, top_k=2, top_p=0.6) == {2, 3}


def test_min_p_drops_what_is_far_below_the_best():
    assert kept(PROBABILITIES, min_p=0.6) == {2, 3}
    assert kept(PROBABILITIES, min_p=0.3) == {1, 2, 3}
    assert kept(PROBABILITIES, min_p=1.0) == {3}


@pytest.mark.parametrize("options", [{"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 1}, {"top_k": 1, "top_p": 1e-9}])
def test_at_least_one_token_is_left(options):
    rows = [logits_of(i) for i in range(50)]
    tokens = draw([request(r, seed=i, temperature=50.0, **options) for i, r in enumerate(rows)])
    assert tokens == [int(r.argmax()) for r in rows]


def test_top_p_of_almost_1_does_not_lose_a_token_that_is_not_rare():
    assert kept(PROBABILITIES, top_p=0.999999) == {0, 1, 2, 3}


# ---- penalties -------------------------------------------------------------------------------------------------------


def penalised(r: Request) -> torch.Tensor:
    """The penalties as a plain loop over tokens."""
    logits, p = r.logits.clone(), r.params
    for token in range(len(logits)):
        if token in r.prompt or token in r.output:
            if logits[token] > 0:
                logits[token] /= p.repetition_penalty
            else:
                logits[token] *= p.repetition_penalty
        logits[token] -= p.presence_penalty * (token in r.output)
        logits[token] -= p.frequency_penalty * r.output.count(token)
    return logits


PENALTIES = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.5},
    {"presence_penalty": -1.5},
    {"frequency_penalty": 0.9},
    {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4},
]


@pytest.mark.parametrize("options", PENALTIES)
def test_penalised_draws_equal_those_of_a_plain_loop(options):
    generator = np.random.default_rng(0)
    requests, plain = [], []
    for i in range(40):
        # Token 3, which fills the unused rest of every row, is in neither prompt nor output.
        prompt = [int(t) for t in generator.choice([0, 1, 2, 5, 6, 7], size=generator.integers(1, 9))]
        output = [int(t) for t in generator.choice([2, 4, 6, 8, 10], size=generator.integers(0, 9))]
        logits = logits_of(i, vocab=12)
        r = request(logits, i, prompt, output, temperature=i % 2, **options)
        requests.append(r)
        plain.append(request(penalised(r), i, prompt, output, temperature=i % 2))
    expected = draw(plain)
    assert draw(requests) == expected
    assert [draw([r])[0] for r in requests] == expected


def penalised_logits(r: Request, monkeypatch) -> torch.Tensor:
    """The logits that the draw of a greedy row sees."""
    seen = []
    original = sampler_module.Sampler._choose

    def spy(self, logits, *rest):
        seen.append(logits.clone())
        return original(self, logits, *rest)

    monkeypatch.setattr(sampler_module.Sampler, "_choose", spy)
    draw([r])
    monkeypatch.undo()
    return seen[0][0]


@pytest.mark.parametrize("options", PENALTIES)
def test_penalised_logits_equal_a_plain_loop(options, monkeypatch):
    r = request(logits_of(11), 0, [4, 4, 9, 17], [9, 9, 9, 20, 4], temperature=0.0, **options)
    torch.testing.assert_close(penalised_logits(r, monkeypatch), penalised(r), rtol=1e-6, atol=1e-6)


def test_presence_and_frequency_leave_the_prompt_alone():
    logits = torch.zeros(VOCAB)
    logits[4], logits[6] = 1.0, 0.9
    options = {"temperature": 0.0, "presence_penalty": 2.0, "frequency_penalty": 2.0}
    assert draw([request(logits, prompt=[4, 4, 4], **options)]) == [4]
    assert draw([request(logits, prompt=[4, 4, 4], output=[4], **options)]) == [6]


def test_repetition_counts_the_prompt():
    logits = torch.zeros(VOCAB)
    logits[4], logits[6] = 1.0, 0.9
    assert draw([request(logits, prompt=[4], temperature=0.0, repetition_penalty=1.5)]) == [6]


# ---- randomness belongs to the request -------------------------------------------------------------------------------


def test_seeded_request_is_the_same_beside_an_unseeded_one():
    logits = logits_of(6)
    for i in range(20):
        seeded = request(logits, 42, output=[2] * i)
        alone = draw([seeded])
        for neighbour_seed in (0, 1, 999999):
            neighbour = request(logits_of(7), neighbour_seed, output=[2] * 3)
            assert draw([seeded, neighbour])[:1] == alone
            assert draw([neighbour, seeded])[1:] == alone


def test_token_i_depends_on_the_seed_and_i_only():
    """Neither on how long the prompt is, nor on what was drawn before, nor on being preempted and resumed."""
    logits = logits_of(8)
    reference_run = [draw([request(logits, 5, output=[2] * i)])[0] for i in range(20)]
    assert len(set(reference_run)) > 3
    other = [draw([request(logits, 5, prompt=[9] * 17, output=[11] * i)])[0] for i in range(20)]
    assert other == reference_run
    assert [draw([request(logits, 6, output=[2] * i)])[0] for i in range(20)] != reference_run


def test_resumed_sequence_draws_what_the_undisturbed_one_draws():
    """One sampler over the whole life: a row that goes on, against one that is left and entered again."""
    logits = logits_of(9)
    params = SamplingParams(max_tokens=None)

    def life(preempted_at: int | None) -> list[int]:
        rows, table = SequenceRows(2, MAX_LEN, 16), SamplingTable(2)
        sampler, tokens, row = Sampler(table, rows, EAGER, CPU), [4, 5, 6], 0

        def enter() -> None:
            new = NewSequence(row, list(tokens), 3, [0, 1, 2, 3], params, 17, ())
            rows.update(batch_of([new]))
            table.update(batch_of([new]))

        enter()
        for i in range(24):
            if i == preempted_at:
                row = 1
                enter()
            at, length = np.array([row]), np.array([len(tokens)])
            token = sampler.sample(logits[None].clone(), at, length).token_ids.numpy()
            rows.append_tokens(at, length, token)
            tokens.append(int(token[0]))
        return tokens

    undisturbed = life(None)
    assert life(1) == life(10) == life(23) == undisturbed


def test_samples_of_one_request_differ():
    """Sample i has the seed + i: neighbouring seeds, yet each pair agrees no more often than chance has it."""
    uniform = torch.zeros(16)
    runs = [[draw([request(uniform, 42 + s, output=[2] * i)])[0] for i in range(40)] for s in range(4)]
    for a in range(4):
        for b in range(a):
            assert sum(x == y for x, y in zip(runs[a], runs[b], strict=True)) < 14  # 2.5 are expected
    # Nor is one the other, shifted by a token.
    assert sum(x == y for x, y in zip(runs[0][1:], runs[1][:-1], strict=True)) < 14


def test_smallest_noise_is_not_zero():
    """Seed 42, token index 3 and this token hash to 0, the worst that a division can meet."""
    worst = reference.exponential_noise(torch.tensor([42]), torch.tensor([3]), torch.tensor([1202852023]))
    assert worst.item() == pytest.approx(2.0**-32, rel=1e-6)
    assert math.isfinite(1 / worst.item())


def test_noise_is_clamped_away_from_zero(monkeypatch):
    monkeypatch.setattr(torch, "log1p", torch.zeros_like)
    noise = reference.exponential_noise(torch.arange(3), torch.arange(3), torch.arange(50))
    assert (noise == 1e-10).all()


# ---- logprobs --------------------------------------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_distribution():
    """Temperature, filters, penalties and forbidden tokens change what is drawn, not what is reported."""
    logits = logits_of(10)
    expected = logits.log_softmax(-1)
    for options in (
        {},
        {"temperature": 0.0},
        {"temperature": 3.0, "top_k": 4, "top_p": 0.8, "min_p": 0.01},
        {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 1.0},
        {"min_tokens": 5},
    ):
        tokens, reports = step(
            [request(logits, 1, [1, 2], [int(logits.argmax())], (int(logits.argmax()),), logprobs=5, **options)]
        )
        report = reports[0]
        assert report.token_id == tokens[0]
        assert report.logprob == pytest.approx(expected[tokens[0]].item(), abs=1e-5)
        values, ids = expected.topk(5)
        assert [t for t, _ in report.top] == ids.tolist()
        assert [v for _, v in report.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_probabilities_of_all_tokens_sum_to_1():
    _, reports = step([request(logits_of(i, vocab=20), logprobs=20) for i in range(3)])
    for report in reports:
        assert sum(math.exp(v) for _, v in report.top) == pytest.approx(1.0, abs=1e-5)


def test_row_that_asks_for_no_logprobs_gets_none():
    logits = logits_of(1)
    _, reports = step(
        [request(logits), request(logits, logprobs=0), request(logits, temperature=0.0), request(logits, logprobs=3)]
    )
    assert [None if r is None else len(r.top) for r in reports] == [None, 0, None, 3]
    assert step([request(logits), request(logits, temperature=0.0)])[1] is None


# ---- min_tokens and mixed batches ------------------------------------------------------------------------------------


def test_stop_tokens_are_masked_until_min_tokens_are_there():
    logits = torch.zeros(VOCAB)
    logits[[4, 9, 2]] = torch.tensor([3.0, 2.0, 1.0])
    tokens = [draw([request(logits, 0, [1] * 7, [5] * i, (4, 9), temperature=0.0, min_tokens=3)])[0] for i in range(5)]
    assert tokens == [2, 2, 2, 4, 4]


def test_masked_stop_tokens_are_never_drawn():
    uniform = torch.zeros(4)
    tokens = draw([request(uniform, i, [1], [], (0, 2), min_tokens=1, top_p=0.99) for i in range(300)])
    assert set(tokens) == {1, 3}


def test_request_without_stop_tokens_may_have_min_tokens():
    assert draw([request(logits_of(1), temperature=0.0, min_tokens=9)]) == [int(logits_of(1).argmax())]


def mixed() -> list[Request]:
    options = [
        {"temperature": 0.0},
        {},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.4, "top_p": 0.7},
        {"min_p": 0.2, "logprobs": 2},
        {"temperature": 0.0, "repetition_penalty": 1.8},
        {"presence_penalty": 1.2, "frequency_penalty": 0.3, "top_k": 9},
        {"temperature": 0.0, "min_tokens": 9, "logprobs": 0},
        {"min_tokens": 9, "top_p": 0.9, "logprobs": 4, "repetition_penalty": 0.7},
    ]
    generator = np.random.default_rng(1)
    return [
        request(
            logits_of(20 + i),
            100 + i,
            generator.integers(0, VOCAB, generator.integers(1, 12)).tolist(),
            generator.integers(0, VOCAB, generator.integers(0, 12)).tolist(),
            (i % VOCAB, int(logits_of(20 + i).argmax())),
            **o,
        )
        for i, o in enumerate(options * 4)
    ]


def test_mixed_batch_gives_each_row_what_it_gets_alone():
    requests = mixed()
    tokens, reports = step(requests)
    for r, token, report in zip(requests, tokens, reports, strict=True):
        alone_tokens, alone_reports = step([r])
        assert [token] == alone_tokens
        alone = alone_reports[0] if alone_reports else None
        assert (report is None) == (alone is None)
        if report is not None:
            assert report.token_id == token
            assert report.logprob == pytest.approx(alone.logprob, abs=1e-5)
            assert [t for t, _ in report.top] == [t for t, _ in alone.top]


def test_row_forgets_the_parameters_of_its_earlier_owner():
    rows, table = SequenceRows(1, MAX_LEN, 16), SamplingTable(1)
    demanding, logits = mixed()[8], logits_of(2)
    for r in (demanding, request(logits, temperature=0.0)):
        new = NewSequence(0, r.prompt + r.output, len(r.prompt), [0, 1, 2, 3], r.params, r.seed, r.stop_token_ids)
        rows.update(batch_of([new]))
        table.update(batch_of([new]))
        sampled = Sampler(table, rows, EAGER, CPU).sample(
            r.logits[None].clone(), np.array([0]), np.array([len(new.token_ids)])
        )
    assert sampled.token_ids.tolist() == [int(logits.argmax())]
    assert sampled.logprobs is None


def test_the_only_token_left_is_drawn_whatever_its_noise():
    """At this seed the uniform number rounds to 1, whose exponential noise was infinite: a masked token won."""
    logits = torch.zeros(4096)
    logits[1192] = 5.0
    assert draw([request(logits, seed=10293, top_k=1)]) == [1192]

"""What the runner hands to model and attention, and where results go, seen by a model that answers from its input."""

from __future__ import annotations

import pytest
import torch
from runner_driver import CPU, GREEDY, Driver, decoder_from_hf
from transformers import AutoModelForCausalLM, Qwen3Config

from nanoinfer.config import SamplingParams
from nanoinfer.engine.batch import NewSequence, ScheduledBatch
from nanoinfer.kernels.kernel_set import EAGER
from nanoinfer.layers.group import ALONE
from nanoinfer.runner.model_runner import ModelRunner, allocate_kv_caches

BLOCK, VOCAB = 4, 200


class Spy:
    """Model and attention back end in one. The token after token t is t + 1."""

    kernels = EAGER
    group = ALONE
    name = "spy"
    reads_device_only = False

    def __init__(self) -> None:
        self.batches, self.inputs = [], []

    def plan(self, batch):
        self.batches.append(batch)
        return batch

    def forward(self, input_ids, plan, kv_caches, sample_at):
        self.inputs.append(input_ids.tolist())
        return input_ids[sample_at]

    def logits(self, hidden):
        return torch.nn.functional.one_hot(hidden + 1, VOCAB).float()


@pytest.fixture
def spy():
    return Spy()


@pytest.fixture
def runner(spy):
    caches = allocate_kv_caches(1, 64, BLOCK, 1, 8, torch.float32, CPU)
    return ModelRunner(spy, spy, caches, max_num_seqs=6, max_model_len=32, device=CPU)


def new(row, token_ids, block_table, sampling=GREEDY, prompt_len=None, stop_token_ids=(), seed=0):
    prompt_len = len(token_ids) if prompt_len is None else prompt_len
    return NewSequence(row, list(token_ids), prompt_len, list(block_table), sampling, seed, stop_token_ids)


def batch(work, entering=(), blocks=(), num_decodes=0):
    """A step over (row, start, count, sample) entries."""
    rows, starts, query_lens, is_sampled = (list(column) for column in zip(*work, strict=True))
    return ScheduledBatch(0, list(entering), list(blocks), rows, starts, query_lens, is_sampled, num_decodes)


def test_chunk_reads_to_its_own_end_and_the_last_one_samples(runner, spy):
    entering = [new(2, range(10, 20), [7, 3, 9])]
    assert runner.run(batch([(2, 0, 3, False)], entering)).token_ids == []
    assert runner.run(batch([(2, 3, 4, False)])).token_ids == []
    assert runner.run(batch([(2, 7, 3, True)])).token_ids == [20]
    assert spy.inputs == [[10, 11, 12], [13, 14, 15, 16], [17, 18, 19]]
    assert [b.context_lens.tolist() for b in spy.batches] == [[3], [7], [10]]
    assert [b.positions.tolist() for b in spy.batches] == [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9]]
    assert [b.block_tables.tolist() for b in spy.batches] == [[[7]], [[7, 3]], [[7, 3, 9]]]


def test_keys_go_to_the_slots_of_the_blocks_in_their_order(runner, spy):
    runner.run(batch([(0, 0, 6, True), (4, 2, 3, True)], [new(0, range(6), [5, 2]), new(4, range(5), [40, 1])]))
    assert spy.batches[0].slot_mapping.tolist() == [20, 21, 22, 23, 8, 9, 162, 163, 4]
    assert spy.batches[0].cu_seqlens_q.tolist() == [0, 6, 9]
    assert (spy.batches[0].starts, spy.batches[0].query_lens) == ([0, 2], [6, 3])


def test_sampled_token_is_the_next_step_s_input(runner, spy):
    runner.run(batch([(1, 0, 2, True)], [new(1, [50, 60], [3])]))
    assert runner.run(batch([(1, 2, 1, True)], num_decodes=1)).token_ids == [62]
    assert runner.run(batch([(1, 3, 1, True)], num_decodes=1)).token_ids == [63]
    assert spy.inputs[1:] == [[61], [62]]
    assert spy.batches[2].num_decodes == 1


def test_block_added_in_a_step_serves_that_step(runner, spy):
    runner.run(batch([(1, 0, 4, True), (3, 0, 4, True)], [new(1, range(4), [3]), new(3, range(20, 24), [8])]))
    result = runner.run(batch([(3, 4, 1, True), (1, 4, 1, True)], blocks=[(1, 11), (3, 12)], num_decodes=2))
    assert result.token_ids == [25, 5]
    assert spy.batches[1].slot_mapping.tolist() == [12 * BLOCK, 11 * BLOCK]
    assert spy.batches[1].block_tables.tolist() == [[8, 12], [3, 11]]


def test_two_blocks_added_to_one_row_keep_their_order(runner, spy):
    runner.run(batch([(0, 0, 3, False)], [new(0, range(12), [3])]))
    runner.run(batch([(0, 3, 9, True)], blocks=[(0, 9), (0, 6)]))
    assert spy.batches[1].block_tables.tolist() == [[3, 9, 6]]


def test_results_come_in_the_batch_s_order_without_those_that_do_not_sample(runner):
    entering = [new(row, [30 * row + 5, 30 * row + 7], [row]) for row in range(5)]
    work = [(3, 0, 2, True), (0, 0, 1, False), (4, 0, 2, True), (1, 0, 2, True), (2, 0, 1, False)]
    assert runner.run(batch(work, entering)).token_ids == [98, 128, 38]


def test_logprobs_are_beside_the_tokens_of_those_that_asked(runner):
    asking = SamplingParams(temperature=0.0, logprobs=1)
    entering = [new(0, [5], [0]), new(1, [6, 7], [1], asking), new(2, [8], [2], asking)]
    result = runner.run(batch([(2, 0, 1, True), (1, 0, 1, False), (0, 0, 1, True)], entering))
    assert result.token_ids == [9, 6]
    assert [report and report.token_id for report in result.logprobs] == [9, None]


def test_next_owner_of_a_row_inherits_nothing(runner, spy):
    """An owner with a longer text, more blocks and every sampling rule leaves; a plain short one takes the row."""
    demanding = SamplingParams(
        temperature=3.0, top_k=2, top_p=0.5, repetition_penalty=2.0, frequency_penalty=2.0, min_tokens=9, logprobs=3
    )
    runner.run(batch([(0, 0, 12, True)], [new(0, range(100, 112), [4, 5, 6], demanding, 3, (71, 72, 73))]))
    result = runner.run(batch([(0, 0, 2, True)], [new(0, [69, 70], [9])]))
    assert (result.token_ids, result.logprobs) == ([71], None)
    assert spy.inputs[1] == [69, 70]
    assert spy.batches[1].block_tables.tolist() == [[9]]
    for position in (2, 3):
        runner.run(batch([(0, position, 1, True)]))
    runner.run(batch([(0, 4, 1, True)], blocks=[(0, 17)]))
    assert spy.inputs[2:] == [[71], [72], [73]]
    assert spy.batches[-1].block_tables.tolist() == [[9, 17]]


def test_stale_rest_of_a_row_is_not_penalised(runner):
    """Only what the sequence itself knows counts as an occurrence."""
    runner.run(batch([(0, 0, 8, True)], [new(0, [71] * 8, [4, 5])]))
    penalised = SamplingParams(temperature=0.0, presence_penalty=2.0, repetition_penalty=2.0)
    entering = [new(0, [70], [9], penalised), new(1, range(9), [1, 2, 3], penalised)]
    assert runner.run(batch([(0, 0, 1, True), (1, 0, 9, True)], entering)).token_ids == [71, 9]


def test_resumed_sequence_knows_its_output_from_its_prompt(runner):
    """Presence counts the output only, which starts at prompt_len also after a preemption."""
    penalised = SamplingParams(temperature=0.0, presence_penalty=2.0)
    tokens = [51, 8, 50]  # 51 comes next, and is in the prompt or, below, in the output
    assert runner.run(batch([(0, 0, 3, True)], [new(0, tokens, [1], penalised, 3)])).token_ids == [51]
    assert runner.run(batch([(0, 0, 3, True)], [new(0, tokens, [1], penalised, 0)])).token_ids != [51]


def test_pool_has_a_key_and_a_value_tensor_per_layer_that_share_nothing():
    caches = allocate_kv_caches(3, 5, BLOCK, 2, 8, torch.bfloat16, CPU)
    tensors = [tensor for pair in caches for tensor in pair]
    assert len(caches) == 3
    for i, tensor in enumerate(tensors):
        assert (tuple(tensor.shape), tensor.dtype) == ((5, BLOCK, 2, 8), torch.bfloat16)
        assert tensor.is_contiguous()
        assert not tensor.any()
        tensor.fill_(i + 1)
    assert [tensor.float().mean().item() for tensor in tensors] == [1, 2, 3, 4, 5, 6]


def test_text_after_other_requests_used_rows_and_blocks_is_that_of_a_fresh_runner():
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=211, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, initializer_range=0.15, tie_word_embeddings=False,
    )  # fmt: skip
    decoder = decoder_from_hf(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())
    long = [torch.randint(0, 211, (n,)).tolist() for n in (150, 90, 60)]
    short = [torch.randint(0, 211, (n,)).tolist() for n in (5, 33, 1)]
    used = Driver(decoder, num_blocks=24)  # so few that the short ones get blocks of the long ones
    used.generate(long, 20, chunk=40)
    fresh = Driver(decoder, num_blocks=24)
    options = {"sampling": [GREEDY, SamplingParams(seed=3, max_tokens=None), GREEDY]}
    assert used.generate(short, 20, **options) == fresh.generate(short, 20, **options)

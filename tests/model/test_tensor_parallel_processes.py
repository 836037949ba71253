"""The same with processes and gloo: what a person starts with --tp."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from test_tensor_parallel import GREEDY, SAMPLING, make_case

from nanoinfer import LLM


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return make_case("qwen3-gqa2", tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("tp", "options"), [(2, {"num_blocks": 10, "max_prefill_chunk": 5}), (4, {"dtype": "float32"})]
)
def test_greedy_and_sampled_ids_equal_those_of_one_process(case, tp, options):
    folder, prompts, expected = case
    threads = torch.get_num_threads()
    with LLM(folder, device="cpu", **({"num_blocks": 128} | options)) as llm:
        sampled = [[s.token_ids for s in output.outputs] for output in llm.generate(prompts[:6], SAMPLING)]
    with LLM(folder, device="cpu", tensor_parallel_size=tp, **({"num_blocks": 128} | options)) as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)] == expected
        assert [[s.token_ids for s in output.outputs] for output in llm.generate(prompts[:6], SAMPLING)] == sampled
        assert llm.check_integrity() == []
    assert torch.get_num_threads() == threads


def peak_memory(pid):
    """The most bytes that a process has had, without what is mapped from files, which are torch's libraries."""
    status = Path(f"/proc/{pid}/status").read_text()
    peak, mapped = (int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) for name in ("VmHWM", "RssFile"))
    return (peak - mapped) << 10


def peaks(llm):
    return [peak_memory(worker.process.pid) for worker in llm._executor._ranks._workers]


def test_smollm2_on_three_ranks(smollm2_folder, case):
    prompt = "The old lighthouse keeper climbed the stairs and"
    with LLM(case[0], device="cpu", num_blocks=64, tensor_parallel_size=2) as llm:
        llm.generate([[1, 2, 3]], GREEDY)
        (bare,) = peaks(llm)  # of a rank with hardly any weights: how much that is depends on the build of torch
    answers = []
    for tp in (1, 3):
        with LLM(str(smollm2_folder), device="cpu", num_blocks=64, tensor_parallel_size=tp) as llm:
            answers.append(llm.generate([prompt, prompt[:20]], GREEDY))
            if tp > 1:  # the whole file has 513 MiB, a rank's part 171
                assert max(peaks(llm)) < bare + llm.info.weight_bytes + (60 << 20)
    texts = [[output.outputs[0].text for output in outputs] for outputs in answers]
    assert texts[0] == texts[1]

"""A trace of engine steps, of a tiny model with random weights."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from nanoinfer import LLM, SamplingParams

TINY = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 128, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def llm(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    with LLM(str(tmp_path), load_format="dummy", device="cpu", kernels="eager", num_blocks=8) as llm:
        yield llm


def run(llm: LLM, steps: int) -> None:
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True))


@pytest.mark.parametrize(("skip", "steps", "recorded"), [(0, 9, 3), (5, 20, 3), (0, 3, 2), (4, 5, 0)])
def test_what_is_recorded(
    llm: LLM, tmp_path: Path, capfd: pytest.CaptureFixture[str], skip: int, steps: int, recorded: int
) -> None:
    path = tmp_path / "trace.json.gz"
    trace = llm.trace_steps(path, skip=skip, count=3)
    run(llm, steps)
    assert trace.close() == recorded
    assert trace.close() == recorded
    assert path.exists() == (recorded > 0)
    if recorded:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        names = {event["name"] for event in events}
        assert {f"ProfilerStep#{skip + 1 + i}" for i in range(recorded)} <= names
        assert f"ProfilerStep#{skip}" not in names
        assert "aten::linear" in names
    assert capfd.readouterr() == ("", "")
    run(llm, 2)  # goes on as before


def test_tracing_changes_no_token(llm: LLM, tmp_path: Path) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    before = llm.generate([[5, 6]], sampling)
    trace = llm.trace_steps(tmp_path / "trace.json", skip=1, count=2)
    assert llm.generate([[5, 6]], sampling)[0].outputs[0].token_ids == before[0].outputs[0].token_ids
    assert trace.close() == 2

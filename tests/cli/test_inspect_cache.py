"""`nanoinfer inspect-cache` on a stand-in engine, and its plan from a config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM
from program import Program

PREFIX = "the same beginning of all prompts, 44 letters"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    lines = [{"id": f"p{i}", "prompt": f"{PREFIX[:44]}{i} and an end"} for i in range(4)]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_report_shows_sharing_hits_and_integrity(nanoinfer: Program, prompts: Path) -> None:
    result = nanoinfer("inspect-cache", "-f", prompts, "--show-text")
    assert result.code == 0, result.err
    for text in (
        "1,024 blocks of 4 tokens",
        "by 4    " + "█" * 16 + " 11",  # the shared prefix at the fullest moment
        "            44444444444",  # and on the map
        "and 960 free blocks",
        "tokens 0-43 (11 blocks), 3 hits, idle 0  the same beginning of all prom",
        "(11 blocks), 3 hits saved 132 tokens  the same beginning",
        "132 of 224 prompt tokens (59%)",
        "p0                  56       0    0%  no prompt before it began alike",
        "p3                  56      44   79%  differs from p0 at token 44",
        "integrity   ok",
    ):
        assert text in result.out
    assert max(map(len, result.out.splitlines())) <= 80
    assert PREFIX[:20] not in nanoinfer("inspect-cache", "-f", prompts).out


def test_the_report_as_a_document(nanoinfer: Program, prompts: Path) -> None:
    document = json.loads(nanoinfer("inspect-cache", "-f", prompts, "--json").out)
    assert document["integrity"] == {"ok": True, "problems": []}
    assert [request["cached_tokens"] for request in document["requests"]] == [0, 44, 44, 44]
    assert [request["id"] for request in document["requests"]] == ["p0", "p1", "p2", "p3"]
    [root, *branches] = document["prefix_tree"]["nodes"]
    assert (root["parent"], len(root["blocks"]), root["hits"]) == (None, 11, 3)
    assert [branch["parent"] for branch in branches] == [0, 0, 0, 0]
    assert [request["prefix_break"]["why"] for request in document["requests"]] == ["first", *["differs"] * 3]
    end, fullest = document["end"], document["fullest"]
    assert end["active"] == 0
    assert end["active"] + end["cached"] + end["free"] == 1024
    assert fullest["active"] > 0
    assert document["peak_active_blocks"] >= fullest["active"]


def test_without_the_cache_nothing_hits(nanoinfer: Program, prompts: Path) -> None:
    document = json.loads(nanoinfer("inspect-cache", "-f", prompts, "--json", "--no-enable-prefix-caching").out)
    assert [request["cached_tokens"] for request in document["requests"]] == [0, 0, 0, 0]
    assert document["prefix_tree"]["nodes"] == []


def test_broken_invariants_are_listed_and_end_with_1(nanoinfer: Program, prompts: Path) -> None:
    class Broken(FakeLLM):
        def check_integrity(self) -> list[str]:
            return ["block 7: count 1, but 0 tables hold it"]

    nanoinfer.make = Broken
    result = nanoinfer("inspect-cache", "-f", prompts)
    assert result.code == 1
    assert "integrity   BROKEN\n            block 7: count 1, but 0 tables hold it" in result.out


def test_bad_input(nanoinfer: Program, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("{}\n")
    for arguments in (("-f", tmp_path / "bad.jsonl"), ("--memory", "8GiB"), ("-f", tmp_path / "none")):
        result = nanoinfer("inspect-cache", *arguments)
        assert (result.code, nanoinfer.llm) == (2, None)


# -- --plan ------------------------------------------------------------------------------------------------------------

QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000, "max_position_embeddings": 40960, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3_0_6B))
    return path


def plan(nanoinfer: Program, config: Path, *arguments: str) -> dict[str, Any]:
    result = nanoinfer("inspect-cache", config, "--plan", "--json", *arguments)
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert isinstance(document, dict)
    return document


def test_a_file_of_prompts_is_no_model(nanoinfer: Program, tmp_path: Path) -> None:
    result = nanoinfer("inspect-cache", tmp_path / "events.jsonl")
    assert result.code == 2
    assert "events.jsonl is taken for a model; give prompts with -f" in result.err


def test_a_plan_needs_only_a_config(nanoinfer: Program, config: Path) -> None:
    document = plan(nanoinfer, config, "--memory", "24GiB")
    assert nanoinfer.llm is None
    assert document["kv_bytes_per_token"] == 114_688
    assert document["weights"] == 2 * 596_049_920
    used = sum(document[name] for name in ("weights", "activations", "overhead", "kv_bytes"))
    assert document["block_size"] == 64  # the Triton back end's, which a GPU gets
    assert 0 <= document["usable"] - used < 114_688 * 64
    assert document["tokens"] == document["num_blocks"] * 64
    assert document["sequences"] == document["num_blocks"] // (40960 // 64)
    on_cpu = plan(nanoinfer, config, "--memory", "24GiB", "--device", "cpu")
    assert (on_cpu["block_size"], on_cpu["overhead"] < document["overhead"] / 2) == (16, True)  # no CUDA context


QWEN3_32B = QWEN3_0_6B | {
    "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_3_1_70B = LLAMA_3_1_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "parameters", "kv_bytes_per_token"),
    [
        (QWEN3_0_6B, 596_049_920, 114_688),
        (QWEN3_32B, 32_762_123_264, 262_144),
        (LLAMA_3_1_8B, 8_030_261_248, 131_072),
        (LLAMA_3_1_70B, 70_553_706_496, 327_680),
    ],
)
def test_published_models_are_planned_exactly(
    nanoinfer: Program, tmp_path: Path, shape: dict[str, Any], parameters: int, kv_bytes_per_token: int
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(shape))
    document = plan(nanoinfer, path, "--memory", "200GiB")
    assert (document["parameters"], document["weights"]) == (parameters, 2 * parameters)
    assert document["kv_bytes_per_token"] == kv_bytes_per_token
    # All of them have eight KV heads: split over up to eight ranks, replicated beyond.
    for tp, share in ((2, 2), (4, 4), (8, 8), (16, 8)):
        one_rank = plan(nanoinfer, path, "--memory", "200GiB", "--tp", str(tp))
        assert one_rank["kv_bytes_per_token"] * share == kv_bytes_per_token
        assert parameters / tp <= one_rank["weights"] / 2 < parameters / tp * (1.6 if tp > 8 else 1.01)


def test_a_plan_of_two_ranks_halves_the_kv_of_a_token(nanoinfer: Program, config: Path) -> None:
    document = plan(nanoinfer, config, "--memory", "24GiB", "--tp", "2", "--block-size", "32", "--dtype", "float32")
    assert document["kv_bytes_per_token"] == 114_688
    assert (document["tp"], document["block_size"], document["dtype"]) == (2, 32, "float32")


def test_a_plan_as_text(nanoinfer: Program, config: Path) -> None:
    result = nanoinfer("inspect-cache", config, "--plan", "--memory", "24GiB")
    assert "0.60 billion parameters in bfloat16" in result.out
    assert "114,688 B" in result.out
    assert "estimate" in result.out


def test_plans_that_cannot_be(nanoinfer: Program, config: Path) -> None:
    for arguments, message in (
        ((), "--plan needs the memory of one GPU"),
        (("--memory", "1GiB"), "nothing is left for the KV cache"),
        (("--memory", "8GiB", "--tp", "3"), "16 attention heads cannot be split over 3 ranks"),
        (("--memory", "lots"), "is not a memory size"),
    ):
        result = nanoinfer("inspect-cache", config, "--plan", *arguments)
        assert result.code == 2
        assert message in " ".join(result.err.split())

"""Weights from safetensors: every slot gets its bytes, every broken checkpoint gets one clear error."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoinfer.errors import ModelError
from nanoinfer.loading import safetensors as loading
from nanoinfer.loading.folder import read_eos_token_ids, read_generation_config, read_model_config
from nanoinfer.loading.safetensors import load_weights, write_safetensors
from nanoinfer.models.weights import WeightSlot

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {EMBEDDING: torch.randn(50, 12), "model.norm.weight": torch.randn(12), "a.weight": torch.randn(6, 12)}


def slots_for(
    given: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32, **shards: tuple[int, int, int]
) -> dict[str, WeightSlot]:
    slots = {}
    for name, tensor in given.items():
        shape = list(tensor.shape)
        shard = shards.get(name.split(".")[0])
        if shard:
            shape[shard[0]] = shard[2] - shard[1]
        slots[name] = WeightSlot(torch.full(shape, torch.nan, dtype=dtype), tuple(tensor.shape), shard)
    return slots


def refusal(slots: dict[str, WeightSlot], folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_weights(slots, folder)
    return str(caught.value)


# -- what is read


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.float16, torch.bfloat16])
def test_dtype_is_converted_on_the_way(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    given = {name: tensor.to(stored) for name, tensor in tensors().items()}
    save_file(given, tmp_path / "model.safetensors")
    slots = slots_for(given, wanted)
    load_weights(slots, tmp_path)
    for name, tensor in given.items():
        assert torch.equal(slots[name].target, tensor.to(wanted)), name


def test_tensors_go_straight_into_a_fused_parameter(tmp_path: Path) -> None:
    q, k = torch.randn(8, 12), torch.randn(4, 12)
    save_file({"q": q, "k": k}, tmp_path / "model.safetensors")
    fused = torch.nn.Parameter(torch.full((12, 12), torch.nan))
    load_weights({"q": WeightSlot(fused[:8], (8, 12)), "k": WeightSlot(fused[8:], (4, 12))}, tmp_path)
    assert torch.equal(fused, torch.cat([q, k]))


def test_a_target_that_is_not_contiguous_is_filled(tmp_path: Path) -> None:
    given = torch.randn(8, 12)
    save_file({"a": given}, tmp_path / "model.safetensors")
    target = torch.zeros(12, 8)
    load_weights({"a": WeightSlot(target.t(), (8, 12))}, tmp_path)
    assert torch.equal(target.t(), given)


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard", [(0, 20, 30), (1, 3, 9), (0, 0, 0), (1, 0, 12)])
def test_only_this_ranks_slice_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: torch.dtype, shard: tuple[int, int, int]
) -> None:
    given = {"part.weight": torch.randn(50, 12)}
    save_file(given, tmp_path / "model.safetensors")
    read = []
    read_exactly = loading._read_exactly
    monkeypatch.setattr(loading, "_read_exactly", lambda f, view, p: (read.append(len(view)), read_exactly(f, view, p)))
    slots = slots_for(given, wanted, part=shard)
    load_weights(slots, tmp_path)
    expected = given["part.weight"].narrow(shard[0], shard[1], shard[2] - shard[1])
    assert torch.equal(slots["part.weight"].target, expected.to(wanted))
    assert sum(read) == expected.numel() * 4


@pytest.mark.parametrize("shard", [None, (0, 5, 33), (1, 2, 11)])
def test_a_tensor_larger_than_the_staging_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard: tuple[int, int, int] | None
) -> None:
    monkeypatch.setattr(loading, "_STAGING_BYTES", 7 * 48 + 4)  # seven rows and a bit
    given = {"part.weight": torch.randn(50, 12)}
    save_file(given, tmp_path / "model.safetensors")
    slots = slots_for(given, torch.bfloat16, **({"part": shard} if shard else {}))
    load_weights(slots, tmp_path)
    expected = given["part.weight"].narrow(shard[0], shard[1], shard[2] - shard[1]) if shard else given["part.weight"]
    assert torch.equal(slots["part.weight"].target, expected.to(torch.bfloat16))


@pytest.mark.parametrize("index", [True, False])
def test_shards_with_and_without_an_index(tmp_path: Path, index: bool) -> None:
    given = tensors()
    files = {name: f"model-0000{i + 1}-of-00003.safetensors" for i, name in enumerate(given)}
    for name, file in files.items():
        save_file({name: given[name]}, tmp_path / file)
    if index:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
        # A second copy under another framework's name is not read.
        save_file({"other": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    slots = slots_for(given)
    load_weights(slots, tmp_path)
    assert all(torch.equal(slots[name].target, tensor) for name, tensor in given.items())
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "lacks the weight file model-00002-of-00003.safetensors" in refusal(slots_for(given), tmp_path)


def test_progress_counts_every_byte_on_the_callers_thread(tmp_path: Path) -> None:
    given = tensors()
    save_file(given, tmp_path / "model.safetensors")
    seen: list[tuple[str, int, int]] = []
    threads = set()

    def notify(*report: Any) -> None:
        seen.append(report)
        threads.add(threading.current_thread())

    load_weights(slots_for(given, a=(0, 0, 3)), tmp_path, notify)
    total = 4 * (50 * 12 + 12 + 3 * 12)
    assert {stage for stage, _, _ in seen} == {"load"}
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1] == ("load", total, total)
    assert threads == {threading.current_thread()}


def test_a_multimodal_checkpoint_gives_its_language_model(tmp_path: Path) -> None:
    embedding, norm, head = torch.randn(50, 12), torch.randn(12), torch.randn(50, 12)
    others = {"model.visual.patch.weight": torch.zeros(3), HEAD: head}
    text = {"embed_tokens.weight": embedding, "norm.weight": norm}
    save_file(others | {f"model.language_model.{n}": t for n, t in text.items()}, tmp_path / "model.safetensors")
    slots = slots_for({f"model.{name}": tensor for name, tensor in text.items()} | {HEAD: head})
    load_weights(slots, tmp_path)
    assert torch.equal(slots[EMBEDDING].target, embedding)
    assert torch.equal(slots["model.norm.weight"].target, norm)
    assert torch.equal(slots[HEAD].target, head)


def test_rotary_buffers_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    given = tensors()
    save_file(given | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, tmp_path / "model.safetensors")
    load_weights(slots_for(given), tmp_path)


# -- tied checkpoints


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_a_tied_checkpoint_may_store_an_equal_head(tmp_path: Path, wanted: torch.dtype) -> None:
    given = tensors()
    save_file(given | {HEAD: given[EMBEDDING].clone()}, tmp_path / "model.safetensors")
    load_weights(slots_for(given, wanted), tmp_path)


@pytest.mark.parametrize("shape", [(50, 12), (48, 12)])
def test_a_tied_checkpoint_with_another_head_is_refused_by_name(tmp_path: Path, shape: tuple[int, int]) -> None:
    given = tensors()
    head = given[EMBEDDING][: shape[0]].clone()
    head[-1, -1] += 1
    save_file(given | {HEAD: head}, tmp_path / "model.safetensors")
    text = refusal(slots_for(given), tmp_path)
    assert "lm_head.weight that differs" in text
    assert "tie_word_embeddings" in text


# -- what is refused


def test_missing_unexpected_and_misshapen_tensors_are_listed_in_one_error(tmp_path: Path) -> None:
    given = tensors()
    save_file(
        {EMBEDDING: given[EMBEDDING], "a.weight": torch.zeros(6, 11), "b.bias": torch.zeros(1), "c": torch.zeros(1)},
        tmp_path / "model.safetensors",
    )
    slots = slots_for(given)
    text = refusal(slots, tmp_path)
    assert "1 missing: model.norm.weight;" in text
    assert text.endswith(". Fetch the model again, or put back the config.json that came with these weights.")
    assert "2 unexpected: b.bias, c;" in text
    assert "1 misshapen: a.weight (file [6, 11], config.json [6, 12])" in text
    assert slots[EMBEDDING].target.isnan().all(), "nothing may be written before the whole checkpoint is checked"


def test_a_long_list_of_missing_tensors_is_cut(tmp_path: Path) -> None:
    save_file({"x0": torch.zeros(1)}, tmp_path / "model.safetensors")
    text = refusal(slots_for({f"x{i}": torch.zeros(1) for i in range(100)}), tmp_path)
    assert "99 missing" in text
    assert "and 79 more" in text


def test_a_type_that_is_no_float_is_refused_by_name(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(6, 12, dtype=torch.int8)}, tmp_path / "model.safetensors")
    assert "a.weight (I8)" in refusal(slots_for({"a.weight": torch.zeros(6, 12)}), tmp_path)


@pytest.mark.parametrize("size", [0, 5, 8, 60, -1])
def test_a_truncated_file_is_one_clear_error(tmp_path: Path, size: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors(), path)
    path.write_bytes(path.read_bytes()[:size])
    text = refusal(slots_for(tensors()), tmp_path)
    assert str(path) in text
    assert "download it again" in text


def test_a_header_that_lies_is_one_clear_error(tmp_path: Path) -> None:
    def write(header: Any) -> None:
        text = json.dumps(header).encode()
        (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))

    for header in (
        [],
        {"a.weight": {}},
        {"a.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a.weight": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}},
        {"a.weight": {"dtype": "F32", "shape": "x", "data_offsets": [0, 8]}},
    ):
        write(header)
        assert "damaged header" in refusal(slots_for({"a.weight": torch.zeros(2)}), tmp_path), header


def test_a_git_lfs_pointer_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "git lfs pull" in refusal({}, tmp_path)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tensors()
    path = tmp_path / "model.safetensors"
    save_file(given, path)
    fill = loading._fill
    monkeypatch.setattr(loading, "_fill", lambda *args: (path.write_bytes(b""), fill(*args)))
    assert "became shorter" in refusal(slots_for(given), tmp_path)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (sys.exit, ("a pickle was opened",))


def test_pickle_weights_are_refused_and_never_opened(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    text = refusal(slots_for(tensors()), tmp_path)
    assert "pytorch_model.bin" in text
    assert "never read" in text


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    assert "holds no weights" in refusal(slots_for(tensors()), tmp_path)
    (tmp_path / "small.gguf").touch()
    assert str(tmp_path / "small.gguf") in refusal(slots_for(tensors()), tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert "weight_map" in refusal(slots_for(tensors()), tmp_path)


# -- memory


MEMORY_PROBE = """
import sys, torch
from pathlib import Path
from nanoinfer.loading.safetensors import load_weights
from nanoinfer.models.weights import WeightSlot

def resident(kind):
    return next(int(l.split()[1]) / 1024 for l in open("/proc/self/status") if l.startswith(kind))

torch.ones(1000, 1000).bfloat16()  # what torch sets up at first use is not the loader's
dtype = getattr(torch, sys.argv[2])
slots = {f"w{i}": WeightSlot(torch.empty(2048, 2048, dtype=dtype), (2048, 2048)) for i in range(8)}
before = resident("VmRSS")
load_weights(slots, Path(sys.argv[1]))
print(resident("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("dtype", "megabytes"), [("float32", 128), ("bfloat16", 64)])
def test_weights_are_in_memory_once_while_they_load(tmp_path: Path, dtype: str, megabytes: int) -> None:
    save_file({f"w{i}": torch.ones(2048, 2048) for i in range(8)}, tmp_path / "model.safetensors")
    probe = [sys.executable, "-c", MEMORY_PROBE, str(tmp_path), dtype]
    peak = float(subprocess.run(probe, check=True, capture_output=True, text=True).stdout)
    # The peak counts mapped file pages too; one staging buffer per thread comes on top when types differ.
    assert megabytes - 1 <= peak <= megabytes + 40


# -- the writer, and the small files of a folder


def test_written_files_are_read_by_the_safetensors_library(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    a, b = torch.randn(3, 5), torch.randn(7).bfloat16()
    pieces = [a[:1].numpy().tobytes(), a[1:].numpy().data, b.view(torch.uint8).numpy().tobytes()]
    write_safetensors(path, {"a": ("F32", (3, 5)), "b": ("BF16", (7,))}, pieces)
    read = load_file(path)
    assert torch.equal(read["a"], a)
    assert torch.equal(read["b"], b)


def test_end_of_sequence_is_the_union_of_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    assert read_eos_token_ids(tmp_path) == (1,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    assert read_eos_token_ids(tmp_path) == (1, 2, 3)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert read_eos_token_ids(tmp_path) == (1,)


def test_configuration_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        read_model_config(tmp_path)
    for text, words in (("{", "not valid JSON"), ("[]", "list instead of an object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=words):
            read_model_config(tmp_path)
    assert read_generation_config(tmp_path) == {}


def test_a_link_into_a_cache_that_was_emptied(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blobs" / "gone")
    with pytest.raises(ModelError, match=r"cannot be read: No such file or directory\. Its file in the cache is gone;"):
        load_weights(slots_for(tensors()), tmp_path)

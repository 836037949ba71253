"""Weights from safetensors files into the decoder's slots: all checked first, then only the needed bytes are read.

The format (https://huggingface.co/docs/safetensors): 8 bytes little-endian header length, a JSON header that maps each
tensor to dtype, shape and byte range, then the data. Reading it directly puts the bytes of a tensor straight into its
parameter: there is never a second copy of the weights, and no mapped file pages pile up.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from nanoinfer.errors import ModelError
from nanoinfer.loading import Notify, silent
from nanoinfer.loading.folder import weight_files
from nanoinfer.models.weights import WeightSlot

if TYPE_CHECKING:
    import torch

_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_STAGING_BYTES = 8 << 20
_READERS = 4  # threads, each with a file of its own
_EMBEDDING, _LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: `dtype` by its safetensors name, `start` = first byte counted from the file's begin."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def item_bytes(self) -> int:
        return _ITEM_BYTES[self.dtype]


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file; ModelError if the file is truncated or is something else."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if prefix.startswith(b"version "):
                raise ModelError(f"{path} is a Git LFS pointer, not the weights; run 'git lfs pull' in its folder.")
            if len(prefix) < 8 or length > size - 8:
                raise ModelError(f"{path} is no safetensors file, or only the beginning of one; download it again.")
            header = json.loads(file.read(length))
        entries = {}
        for name, info in header.items():
            if name != "__metadata__":
                entries[name] = _entry(path, name, info, data_start=8 + length, size=size)
    except OSError as error:
        again = (
            " Its file in the cache is gone; download the model again."
            if path.is_symlink() and not path.exists()
            else ""
        )
        raise ModelError(f"{path} cannot be read: {error.strerror}.{again}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} has a damaged header; download it again.") from error
    return entries


def _entry(path: Path, name: str, info: Mapping[str, Any], *, data_start: int, size: int) -> TensorEntry:
    shape, dtype = tuple(int(n) for n in info["shape"]), str(info["dtype"])
    start, stop = (data_start + int(offset) for offset in info["data_offsets"])
    if stop > size:
        raise ModelError(f"{path} is truncated: tensor {name} ends at byte {stop} of {size}; download it again.")
    expected = math.prod(shape) * _ITEM_BYTES.get(dtype, 0)
    if dtype in _ITEM_BYTES and (start < data_start or stop - start != expected):
        raise ModelError(f"{path} has a damaged header: tensor {name} has {stop - start} bytes instead of {expected}.")
    return TensorEntry(path, dtype, shape, start)


def load_weights(slots: Mapping[str, WeightSlot], folder: Path, notify: Notify = silent) -> None:
    """Fill every slot from the folder's safetensors files, converting to the target's dtype.

    Only this rank's slice of a tensor is read. Reports ("load", bytes done, bytes in all) after each tensor.
    ModelError, before anything is written, that lists all missing, unexpected, misshapen and unreadable tensors; also
    if a tied checkpoint stores a different lm_head.weight.
    """
    entries: dict[str, TensorEntry] = {}
    for path in weight_files(folder):
        entries.update(read_header(path))
    entries = _text_model_only(entries)
    entries = {name: e for name, e in entries.items() if not name.endswith("rotary_emb.inv_freq")}
    tied_head = entries.pop(_LM_HEAD, None) if _LM_HEAD not in slots else None
    _refuse_mismatch(slots, entries, folder)

    jobs = sorted(((e, slots[name]) for name, e in entries.items()), key=lambda job: (job[0].path, job[0].start))
    total = sum(_wanted_bytes(entry, slot) for entry, slot in jobs)
    done = 0
    local = threading.local()  # holds each thread's staging buffer
    pool = ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1))
    try:
        for future in as_completed([pool.submit(_fill, entry, slot, local) for entry, slot in jobs]):
            done += future.result()
            notify("load", done, total)
    finally:
        pool.shutdown(cancel_futures=True)
    if tied_head is not None:
        _check_tied(tied_head, slots[_EMBEDDING], local)


def _text_model_only(entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The language model's tensors of a multimodal checkpoint under their plain names; others unchanged."""
    if not any("language_model." in name for name in entries):
        return entries
    text = {}
    for name, entry in entries.items():
        if name == _LM_HEAD or "language_model." in name:
            plain = re.sub(r"^(model\.)?language_model\.(model\.)?", "model.", name)
            text[plain.replace("model.lm_head.", "lm_head.")] = entry
    return text


def _refuse_mismatch(slots: Mapping[str, WeightSlot], entries: Mapping[str, TensorEntry], folder: Path) -> None:
    both = slots.keys() & entries.keys()
    findings = {
        "missing": sorted(slots.keys() - entries.keys()),
        "unexpected": sorted(entries.keys() - slots.keys()),
        "misshapen": [
            f"{name} (file {list(entries[name].shape)}, config.json {list(slots[name].shape)})"
            for name in sorted(both)
            if entries[name].shape != slots[name].shape
        ],
        "of an unsupported type": [
            f"{name} ({entries[name].dtype})" for name in sorted(both) if entries[name].dtype not in _FLOATS
        ],
    }
    parts = [f"{len(names)} {what}: {_some(names)}" for what, names in findings.items() if names]
    if parts:
        raise ModelError(
            f"the weights in {folder} do not match its config.json; tensors {'; '.join(parts)}. Fetch the model again, "
            "or put back the config.json that came with these weights."
        )


def _some(names: list[str], limit: int = 20) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _wanted_bytes(entry: TensorEntry, slot: WeightSlot) -> int:
    return slot.target.numel() * entry.item_bytes


def _fill(entry: TensorEntry, slot: WeightSlot, local: threading.local) -> int:
    """Copy one tensor (or this rank's slice) into its slot; returns the bytes read."""
    import torch

    target = slot.target.detach()
    whole_rows = slot.shard is None or slot.shard[0] == 0
    same_type = target.dtype == getattr(torch, _FLOATS[entry.dtype])
    if whole_rows and same_type and target.device.type == "cpu" and target.is_contiguous() and target.numel():
        row_bytes = math.prod(entry.shape[1:]) * entry.item_bytes
        first_row = slot.shard[1] if slot.shard else 0
        with entry.path.open("rb", buffering=0) as file:
            file.seek(entry.start + first_row * row_bytes)
            _read_exactly(file, target.view(-1).view(torch.uint8).numpy().data, entry.path)
    else:
        for destination, source in _staged_rows(entry, slot, local):
            destination.copy_(source)
    return _wanted_bytes(entry, slot)


def _staged_rows(
    entry: TensorEntry, slot: WeightSlot, local: threading.local
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs (rows of the target, the same rows from the file in the file's dtype), a few megabytes at a time.

    The second of a pair is only valid until the next pair: all share one staging buffer per thread.
    """
    import torch

    target = slot.target.detach()
    rows, columns = entry.shape[0], math.prod(entry.shape[1:])
    first_row, first_column, width = 0, 0, columns
    if slot.shard is not None:
        dim, start, stop = slot.shard
        assert dim < 2, slot.shard
        if dim == 0:
            first_row, rows = start, stop - start
        else:
            inner = columns // entry.shape[1]
            first_column, width = start * inner, (stop - start) * inner
    width_bytes, stride = width * entry.item_bytes, columns * entry.item_bytes
    if rows == 0 or width == 0:
        return
    if getattr(local, "staging", None) is None:
        local.staging = torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=target.is_cuda)
    group = max(1, _STAGING_BYTES // width_bytes)
    assert width_bytes <= _STAGING_BYTES, (entry, width_bytes)
    with entry.path.open("rb", buffering=0) as file:
        for row in range(0, rows, group):
            count = min(group, rows - row)
            staged = local.staging[: count * width_bytes]
            view = staged.numpy().data
            # Whole rows are one run of bytes; a slice of columns is one short run per row.
            step = count if width_bytes == stride else 1
            for i in range(0, count, step):
                file.seek(entry.start + (first_row + row + i) * stride + first_column * entry.item_bytes)
                _read_exactly(file, view[i * width_bytes : (i + step) * width_bytes], entry.path)
            destination = target[row : row + count]
            yield destination, staged.view(getattr(torch, _FLOATS[entry.dtype])).view(destination.shape)


def _read_exactly(file: IO[bytes], view: memoryview, path: Path) -> None:
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            raise ModelError(f"{path} became shorter while it was read; download it again.")
        done += count


def _check_tied(head: TensorEntry, embedding: WeightSlot, local: threading.local) -> None:
    """Some tied checkpoints store lm_head.weight too: harmless while it equals the embedding."""
    import torch

    equal = head.shape == embedding.shape and head.dtype in _FLOATS
    if not equal or not all(torch.equal(d, s.to(d)) for d, s in _staged_rows(head, embedding, local)):
        raise ModelError(
            f"{head.path} stores an lm_head.weight that differs from the embedding, but config.json ties them; "
            "set tie_word_embeddings to false there if the stored head is meant."
        )


def write_safetensors(
    path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], data: Iterable[bytes | memoryview]
) -> None:
    """Write a file of `tensors` (name -> dtype, shape) whose bytes come from `data`, in order, in pieces of any size.

    OSError if the disk is full.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * _ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        written = sum(file.write(piece) for piece in data)
    assert written == position, (written, position)

"""Reads the header of a GGUF file: its metadata, and where each tensor lies.

Written out here because the gguf package's reader takes seconds for a real vocabulary and answers a truncated file with
an index error. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoinfer.errors import ModelError

if TYPE_CHECKING:
    import numpy as np

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")  # a vocabulary has hundreds of thousands of strings


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor: `type` as in gguf.GGMLQuantizationType, `shape` with the rows first, bytes [start, start + size)."""

    name: str
    type: int
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True)
class GGUFFile:
    """The parsed header of a GGUF file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def raw(self, tensor: GGUFTensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The tensor's bytes as stored, mapped from the file."""
        import numpy as np

        return np.memmap(self.path, dtype=np.uint8, mode="r", offset=tensor.start, shape=(tensor.size,))


class _Cursor:
    def __init__(self, data: memoryview) -> None:
        self.data, self.position = data, 0

    def take(self, code: str, count: int = 1) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{count}{code}", self.data, self.position)
        self.position += struct.calcsize(f"<{count}{code}")
        return values

    def string(self) -> str:
        (length,) = _LENGTH.unpack_from(self.data, self.position)
        start = self.position + 8
        self.position = start + length
        if self.position > len(self.data):
            raise ValueError("a string runs past the end")
        return str(self.data[start : self.position], "utf-8")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.take(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"value type {kind} is unknown")
        item, count = self.take("I")[0], self.take("Q")[0]
        if item in _SCALARS:
            if count > len(self.data):
                raise ValueError("an array runs past the end")
            return list(self.take(_SCALARS[item], count))
        return [self.value(item) for _ in range(count)]


def read_gguf(path: Path) -> GGUFFile:
    """Parse the header of `path`; ModelError if it is no GGUF file, truncated, split or of an unknown kind."""
    import mmap

    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelError(f"{path} is no GGUF file (it does not begin with 'GGUF').")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
                return _parse(path, _Cursor(view))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    except (struct.error, ValueError, TypeError, ArithmeticError, MemoryError) as error:
        raise ModelError(f"{path} is a damaged or truncated GGUF file ({error}); download it again.") from error


def _parse(path: Path, cursor: _Cursor) -> GGUFFile:
    from gguf import GGML_QUANT_SIZES

    cursor.position = 4
    (version,) = cursor.take("I")
    if version not in (2, 3):
        what = "is big-endian" if version & 0xFFFF == 0 else f"has GGUF version {version}"
        raise ModelError(f"{path} {what}; versions 2 and 3, little-endian, are supported.")
    tensor_count, pair_count = cursor.take("Q", 2)
    metadata = {}
    for _ in range(pair_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.take("I")[0])
    if metadata.get("split.count", 1) > 1:
        raise ModelError(
            f"{path} is one of {metadata['split.count']} parts; join them with 'llama-gguf-split --merge' first."
        )
    infos = []
    for _ in range(tensor_count):
        name, (dimensions,) = cursor.string(), cursor.take("I")
        if not 1 <= dimensions <= 4:
            raise ValueError(f"tensor {name} has {dimensions} dimensions")
        shape = cursor.take("Q", dimensions)[::-1]  # stored with the fastest dimension first
        kind, offset = cursor.take("I")[0], cursor.take("Q")[0]
        infos.append((name, shape, kind, offset))
    alignment = metadata.get("general.alignment", 32)
    data_start = -(-cursor.position // alignment) * alignment
    tensors = {}
    sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    for name, shape, kind, offset in infos:
        if kind not in sizes:
            raise ModelError(f"{path}: tensor {name} has the unknown type {kind}.")
        block, block_bytes = sizes[kind]
        size = math.prod(shape) // block * block_bytes
        tensors[name] = GGUFTensor(name, kind, shape, data_start + offset, size)
        if data_start + offset + size > len(cursor.data):
            raise ModelError(f"{path} is truncated: tensor {name} runs past its end; download it again.")
    return GGUFFile(path, metadata, tensors)

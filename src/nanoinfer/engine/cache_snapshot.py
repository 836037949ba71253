"""The KV pool at one moment as plain data: what `inspect-cache` reports on, saved to a file and read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from nanoinfer.errors import UserError

SCHEMA = "nanoinfer-cache-1"


@dataclass(frozen=True, slots=True)
class BlockSnapshot:
    """One physical block. Digest, parent and token ids are None unless it is published; hits count its re-uses.

    `last_use` is on the snapshot's clock: `num_uses` admissions and releases of tables have been until now.
    """

    block: int
    state: Literal["active", "cached", "free"]
    refs: int
    digest: str | None
    parent: str | None  # digest of the block before it; None for the first block of a text
    hits: int
    token_ids: list[int] | None
    last_use: int = 0


@dataclass(frozen=True, slots=True)
class TableSnapshot:
    """The block table of a running sequence; its last block may be partly filled."""

    request_id: str
    index: int
    blocks: list[int]
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """Geometry, every block, the tables of running sequences, and cached blocks in the order of their eviction.

    `engine` has the facts of EngineInfo, where the snapshot is an engine's own.
    """

    num_blocks: int
    block_size: int
    evictions: int
    blocks: list[BlockSnapshot]
    tables: list[TableSnapshot]
    next_victims: list[int]
    num_uses: int = 0
    engine: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Raises UserError if `data` is not a cache snapshot."""
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise UserError(f"this is not a cache snapshot (its schema should be '{SCHEMA}').")
        try:
            values = {key: value for key, value in data.items() if key != "schema"}
            values["blocks"] = [_made(BlockSnapshot, block) for block in _list(values, "blocks")]
            values["tables"] = [_made(TableSnapshot, table) for table in _list(values, "tables")]
            return _made(cls, values)
        except ValueError as error:
            raise UserError(f"this cache snapshot is damaged: {error}.") from error

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises UserError if the file cannot be read as a cache snapshot."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"cannot read the cache snapshot {path}: {reason}.") from error
        return cls.from_json(data)


def _is_int(value: Any) -> bool:
    return type(value) is int


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_ints(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_int, value))


# What a value in a file must be, by the annotation of its field. Lists of snapshots have been made already.
_CHECKS: dict[str, Callable[[Any], bool]] = {
    "int": _is_int,
    "str": _is_text,
    "str | None": lambda value: value is None or _is_text(value),
    "list[int]": _are_ints,
    "list[int] | None": lambda value: value is None or _are_ints(value),
    "Literal['active', 'cached', 'free']": lambda value: value in ("active", "cached", "free"),
    "dict[str, Any]": lambda value: isinstance(value, dict) and (not value or {"model", "dtype"} <= set(value)),
}
Snapshot = TypeVar("Snapshot", bound=BlockSnapshot | TableSnapshot | CacheSnapshot)


def _list(values: dict[str, Any], name: str) -> list[Any]:
    value = values.get(name)
    if not isinstance(value, list):
        raise ValueError(f"{name} is {_short(value)}")
    return value


def _made(kind: type[Snapshot], values: Any) -> Snapshot:
    """ValueError that says which field is missing, unknown or of another type."""
    if not isinstance(values, dict):
        raise ValueError(f"{_short(values)} stands where fields should be")
    for name, value in values.items():
        annotation = next((str(f.type) for f in fields(kind) if f.name == name), None)
        if annotation is None:
            raise ValueError(f"there is no field {_short(name)}")
        if annotation in _CHECKS and not _CHECKS[annotation](value):
            raise ValueError(f"{name} is {_short(value)}")
    try:
        return kind(**values)
    except TypeError as error:  # something is missing
        raise ValueError(str(error).rpartition("() ")[2]) from error


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."

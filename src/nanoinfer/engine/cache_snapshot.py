"""The KV pool at one moment as plain data: what `inspect-cache` reports on, saved to a file and read back."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

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
            fields = {key: value for key, value in data.items() if key != "schema"}
            fields["blocks"] = [BlockSnapshot(**block) for block in fields["blocks"]]
            fields["tables"] = [TableSnapshot(**table) for table in fields["tables"]]
            return cls(**fields)
        except (KeyError, TypeError) as error:
            raise UserError(f"this cache snapshot is damaged: {error}.") from error

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises UserError if the file cannot be read as a cache snapshot."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read the cache snapshot {path}: {error}.") from error
        return cls.from_json(data)

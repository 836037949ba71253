"""What a snapshot of the KV pool says: occupancy, sharing, the tree of cached prefixes. Plain data in and out."""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from nanoinfer.engine.cache_snapshot import BlockSnapshot, CacheSnapshot


@dataclass
class PrefixNode:
    """A run of blocks without a branch: the tree's edges and nodes in one."""

    blocks: list[BlockSnapshot]
    depth: int  # blocks before this run
    children: list[PrefixNode] = field(default_factory=list)

    @property
    def hits(self) -> int:
        """How often the run's first block was found in the cache."""
        return self.blocks[0].hits

    @property
    def refs(self) -> int:
        """How many tables hold the run's first block."""
        return self.blocks[0].refs

    @property
    def last_use(self) -> int:
        return max(block.last_use for block in self.blocks)

    @property
    def token_ids(self) -> list[int]:
        return [token for block in self.blocks for token in block.token_ids or ()]


def prefix_tree(snapshot: CacheSnapshot) -> list[PrefixNode]:
    """The published blocks as a forest, the most used branches first. A block whose parent was evicted is a root."""
    published = {block.digest: block for block in snapshot.blocks if block.digest is not None}
    children: dict[str | None, list[BlockSnapshot]] = {}
    for block in published.values():
        parent = block.parent if block.parent in published else None
        children.setdefault(parent, []).append(block)

    def most_used(blocks: list[BlockSnapshot]) -> list[BlockSnapshot]:
        return sorted(blocks, key=lambda block: (-block.hits, block.block))

    roots = [PrefixNode([block], 0) for block in most_used(children.get(None, []))]
    open_nodes = list(roots)
    while open_nodes:  # a loop, because a long text is a path of thousands of blocks
        node = open_nodes.pop()
        following = children.get(node.blocks[-1].digest, [])
        while len(following) == 1 and (following[0].hits, following[0].refs) == (node.hits, node.refs):
            node.blocks.append(following[0])
            following = children.get(following[0].digest, [])
        node.children = [PrefixNode([block], node.depth + len(node.blocks)) for block in most_used(following)]
        open_nodes += node.children
    return roots


def walk(roots: list[PrefixNode]) -> list[tuple[PrefixNode, int]]:
    """Every node with the number of nodes before it in its text, in reading order."""
    found, stack = [], [(node, 0) for node in reversed(roots)]
    while stack:
        node, level = stack.pop()
        found.append((node, level))
        stack += [(child, level + 1) for child in reversed(node.children)]
    return found


@dataclass(frozen=True)
class CacheReport:
    """Counts of one snapshot. `empty_slots`: those of tables' blocks that hold no KV yet, most in the last block."""

    num_blocks: int
    block_size: int
    active: int
    cached: int
    free: int
    evictions: int
    references: dict[int, int]  # reference count -> number of blocks that have it
    empty_slots: int
    tree: list[PrefixNode]
    next_victims: list[int]
    num_uses: int
    cells: str  # a character per block: f free, c cached, 1 to 9 active with so many references (9: or more)

    @property
    def depth(self) -> int:
        """The longest cached prefix in blocks."""
        return max((node.depth + len(node.blocks) for node, _ in walk(self.tree)), default=0)

    @property
    def fragmentation(self) -> float:
        """The part of the active blocks' slots that is empty."""
        return self.empty_slots / (self.active * self.block_size) if self.active else 0.0


def analyse(snapshot: CacheSnapshot) -> CacheReport:
    states = Counter(block.state for block in snapshot.blocks)
    references = Counter(block.refs for block in snapshot.blocks if block.refs)
    empty = sum(len(t.blocks) * snapshot.block_size - t.num_computed_tokens for t in snapshot.tables)
    return CacheReport(
        num_blocks=snapshot.num_blocks,
        block_size=snapshot.block_size,
        active=states["active"],
        cached=states["cached"],
        free=states["free"],
        evictions=snapshot.evictions,
        references=dict(sorted(references.items())),
        empty_slots=empty,
        tree=prefix_tree(snapshot),
        next_victims=snapshot.next_victims,
        num_uses=snapshot.num_uses,
        cells="".join(str(min(b.refs, 9)) if b.refs else "c" if b.state == "cached" else "f" for b in snapshot.blocks),
    )


def snapshot_problems(snapshot: CacheSnapshot) -> list[str]:
    """Sentences for everything in a snapshot that cannot be; an empty list if all is well."""
    problems = []
    held = Counter(block for table in snapshot.tables for block in table.blocks)
    digests = Counter(block.digest for block in snapshot.blocks if block.digest is not None)
    if len(snapshot.blocks) != snapshot.num_blocks:
        problems.append(f"{len(snapshot.blocks)} blocks are listed, but the pool has {snapshot.num_blocks}")
    for block in snapshot.blocks:
        name = f"block {block.block}"
        if block.refs != held[block.block]:
            problems.append(f"{name}: count {block.refs}, but {held[block.block]} tables hold it")
        if (block.state == "active") != (block.refs > 0):
            problems.append(f"{name} is {block.state} with {block.refs} references")
        if block.state == "cached" and block.digest is None:
            problems.append(f"{name} is cached but not published")
        if block.state == "free" and block.digest is not None:
            problems.append(f"{name} is free but still published")
        if block.digest is not None and not _has_its_content(block, snapshot.block_size):
            problems.append(f"{name}: its digest is not that of its tokens")
    cached = {block.block for block in snapshot.blocks if block.state == "cached"}
    if cached != set(snapshot.next_victims):
        problems.append(f"{len(cached)} blocks are cached, but {len(snapshot.next_victims)} wait for eviction")
    problems += [f"{count} blocks are published under {digest[:12]}" for digest, count in digests.items() if count > 1]
    for table in snapshot.tables:
        if table.num_computed_tokens > len(table.blocks) * snapshot.block_size:
            problems.append(f"the table of {table.request_id} holds fewer tokens than were computed")
    return problems


def _has_its_content(block: BlockSnapshot, block_size: int) -> bool:
    """Whether a published block's digest is the chained hash of its parent's digest and its own tokens."""
    from xxhash import xxh3_128_hexdigest

    tokens = block.token_ids or []
    if len(tokens) != block_size:
        return False
    content = struct.pack(f"<{block_size}q", *tokens)
    return xxh3_128_hexdigest(bytes.fromhex(block.parent or "") + content) == block.digest


def tree_as_json(nodes: list[PrefixNode]) -> list[dict[str, Any]]:
    """The forest as a flat list in reading order; `parent` is the index of the node before it in the text."""
    flat: list[dict[str, Any]] = []
    path: list[int] = []  # indexes of the nodes before the next one, the nearest last
    for node, level in walk(nodes):
        del path[level:]
        flat.append(
            {
                "parent": path[-1] if path else None,
                "depth_blocks": node.depth,
                "blocks": [block.block for block in node.blocks],
                "hits": node.hits,
                "refs": node.refs,
                "last_use": node.last_use,
                "token_ids": node.token_ids,
            }
        )
        path.append(len(flat) - 1)
    return flat

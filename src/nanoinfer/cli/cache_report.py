"""What a snapshot of the KV pool says: occupancy, sharing, the tree of cached prefixes. Plain data in and out."""

from __future__ import annotations

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
        return max(block.refs for block in self.blocks)

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
        while len(following) == 1 and following[0].hits == node.hits:
            node.blocks.append(following[0])
            following = children.get(following[0].digest, [])
        node.children = [PrefixNode([block], node.depth + len(node.blocks)) for block in most_used(following)]
        open_nodes += node.children
    return roots


@dataclass(frozen=True)
class CacheReport:
    """Counts of one snapshot. `wasted_tokens`: slots of running sequences' last blocks that hold nothing."""

    num_blocks: int
    block_size: int
    active: int
    cached: int
    free: int
    evictions: int
    references: dict[int, int]  # reference count -> number of blocks that have it
    wasted_tokens: int
    tree: list[PrefixNode]
    next_victims: list[int]

    @property
    def depth(self) -> int:
        """The longest cached prefix in blocks."""
        deepest, open_nodes = 0, list(self.tree)
        while open_nodes:
            node = open_nodes.pop()
            deepest = max(deepest, node.depth + len(node.blocks))
            open_nodes += node.children
        return deepest


def analyse(snapshot: CacheSnapshot) -> CacheReport:
    states = Counter(block.state for block in snapshot.blocks)
    references = Counter(block.refs for block in snapshot.blocks if block.refs)
    wasted = sum(len(t.blocks) * snapshot.block_size - t.num_computed_tokens for t in snapshot.tables)
    return CacheReport(
        num_blocks=snapshot.num_blocks,
        block_size=snapshot.block_size,
        active=states["active"],
        cached=states["cached"],
        free=states["free"],
        evictions=snapshot.evictions,
        references=dict(sorted(references.items())),
        wasted_tokens=wasted,
        tree=prefix_tree(snapshot),
        next_victims=snapshot.next_victims,
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
    cached = {block.block for block in snapshot.blocks if block.state == "cached"}
    if cached != set(snapshot.next_victims):
        problems.append(f"{len(cached)} blocks are cached, but {len(snapshot.next_victims)} wait for eviction")
    problems += [f"{count} blocks are published under {digest[:12]}" for digest, count in digests.items() if count > 1]
    return problems


def tree_as_json(nodes: list[PrefixNode]) -> list[dict[str, Any]]:
    """The forest as a flat list in reading order; `parent` is the index of the node before it in the text."""
    flat: list[dict[str, Any]] = []
    stack: list[tuple[PrefixNode, int | None]] = [(node, None) for node in reversed(nodes)]
    while stack:
        node, parent = stack.pop()
        index = len(flat)
        flat.append(
            {
                "parent": parent,
                "depth_blocks": node.depth,
                "blocks": [block.block for block in node.blocks],
                "hits": node.hits,
                "refs": node.refs,
                "token_ids": node.token_ids,
            }
        )
        stack += [(child, index) for child in reversed(node.children)]
    return flat

"""Paged KV: which block belongs to whom, which free blocks still hold a reusable prefix, and who is evicted next.

A block is in one of three states: *active* (at least one table holds it), *cached* (no table holds it, but it is
published and can be revived) or *free*. Publishing and look-up use a hash chained over the whole prefix, so a block
can only be found behind the text that it was computed after.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from xxhash import xxh3_128_digest

from nanoinfer.engine.cache_snapshot import BlockSnapshot, CacheSnapshot, TableSnapshot
from nanoinfer.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What one walk over a sequence's blocks found."""

    hit_blocks: list[int]  # published blocks that already hold its leading tokens
    blocks_to_take: int  # available blocks that it would use up: new ones, and hits that no table holds now
    awaits_block: bool  # the first block that missed is being computed by another sequence right now


class BlockManager:
    """The pool of `num_blocks` blocks of `block_size` tokens and its prefix index. Pure bookkeeping, no tensors."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_evictions = 0
        self._ref_counts = [0] * num_blocks
        # Of a published block: its chained digest, the digest of the block before it, and its tokens as packed bytes.
        self._digests: list[bytes | None] = [None] * num_blocks
        self._parents: list[bytes] = [b""] * num_blocks
        self._contents: list[bytes] = [b""] * num_blocks
        self._hits = [0] * num_blocks
        # A clock that ticks at each admission and each release of a table, and when it last touched a block.
        self._num_uses = 0
        self._last_use = [0] * num_blocks
        self._index: dict[bytes, int] = {}  # digest -> block
        # The available blocks: free ones are handed out first, then cached ones, least recently released first.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        # Digests of full blocks that a running sequence had at admission, has not computed yet and will publish.
        self._being_computed: dict[bytes, Sequence] = {}
        self._pack = struct.Struct(f"<{block_size}q").pack

    # -- counts ----------------------------------------------------------------------------------------------------

    @property
    def num_available_blocks(self) -> int:
        """Blocks that can be handed out: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cached)

    @property
    def num_active_blocks(self) -> int:
        return self.num_blocks - self.num_available_blocks

    def blocks_needed(self, seq: Sequence, new_tokens: int) -> int:
        """How many blocks `seq` lacks to hold its computed tokens and `new_tokens` more.

        The scheduler has the case of one more token, as an inlined comparison.
        """
        total = -(-(seq.num_computed_tokens + new_tokens) // self.block_size)
        return max(0, total - len(seq.block_table))

    # -- prefix index ----------------------------------------------------------------------------------------------

    def match_prefix(self, seq: Sequence, *, verify: bool = True) -> PrefixMatch:
        """Walk the index from the first block of a sequence without blocks to the first miss.

        At most (len - 1) // block_size blocks can hit, so at least the last token is computed and a published block
        is never written to. `verify` compares contents as well, so that no collision of digests can count as a hit;
        without it, for a sequence that may not fit anyway, a block costs a third (0.5 us).
        """
        total_blocks = -(-len(seq.token_ids) // self.block_size)
        if not self.enable_prefix_caching:
            return PrefixMatch([], total_blocks, False)
        hits: list[int] = []
        num_revived = 0
        awaits_block = False
        for i in range((len(seq.token_ids) - 1) // self.block_size):
            parent, digest = self._digest(seq, i)
            block = self._index.get(digest)
            if block is None:
                awaits_block = digest in self._being_computed
                break
            if verify and (self._parents[block] != parent or self._contents[block] != seq.block_contents[i]):
                break
            num_revived += self._ref_counts[block] == 0
            hits.append(block)
        return PrefixMatch(hits, total_blocks - len(hits) + num_revived, awaits_block)

    def allocate(self, seq: Sequence, match: PrefixMatch) -> None:
        """Give `seq` the blocks for all its known tokens: the hits of `match` (just computed), then new ones.

        The caller has checked that `match.blocks_to_take` blocks are available. Moves the cursor behind the hits.
        """
        assert not seq.block_table, seq
        self._num_uses += 1
        for block in match.hit_blocks:
            if self._ref_counts[block] == 0:
                del self._cached[block]
            self._ref_counts[block] += 1
            self._hits[block] += 1
            self._last_use[block] = self._num_uses
        seq.block_table.extend(match.hit_blocks)
        seq.num_computed_tokens = len(match.hit_blocks) * self.block_size
        seq.num_published_blocks = len(match.hit_blocks)
        for _ in range(self.blocks_needed(seq, len(seq.token_ids) - seq.num_computed_tokens)):
            self.append_block(seq)
        if self.enable_prefix_caching:
            for i in range(seq.num_published_blocks, len(seq.token_ids) // self.block_size):
                self._being_computed.setdefault(self._digest(seq, i)[1], seq)

    def append_block(self, seq: Sequence) -> int:
        """Take an available block for `seq`: a free one, else the least recently used cached one, which is evicted."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._unpublish(block)
            self.num_evictions += 1
        assert self._ref_counts[block] == 0, (block, self._ref_counts[block])
        self._ref_counts[block] = 1
        self._last_use[block] = self._num_uses
        seq.block_table.append(block)
        return block

    def publish(self, seq: Sequence, num_written_tokens: int) -> None:
        """Enter the full blocks among the first `num_written_tokens` (KV written, ids known) into the index."""
        if not self.enable_prefix_caching:
            return
        for i in range(seq.num_published_blocks, num_written_tokens // self.block_size):
            parent, digest = self._digest(seq, i)
            block = seq.block_table[i]
            self._no_longer_computing(digest, seq)
            # Where equal blocks were computed twice, the first one stays in the index.
            if digest not in self._index:
                self._parents[block], self._contents[block], self._hits[block] = parent, seq.block_contents[i], 0
                self._digests[block] = digest
                self._index[digest] = block
            seq.num_published_blocks = i + 1

    def free(self, seq: Sequence) -> None:
        """Release all blocks of `seq`, last block first, so that a chain loses its tail before its head."""
        self._num_uses += 1
        for block in reversed(seq.block_table):
            self._last_use[block] = self._num_uses
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                if self._digests[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None
        for digest in seq.block_digests[seq.num_published_blocks :]:
            self._no_longer_computing(digest, seq)
        seq.block_table.clear()
        seq.num_published_blocks = 0
        seq.num_computed_tokens = 0

    def release_all(self) -> None:
        """Take every block from every table, whatever state an interrupt has left the bookkeeping in.

        The caller clears the tables. Published blocks stay published: their KV was written before that.
        """
        self._ref_counts = [0] * self.num_blocks
        self._index = {digest: block for block, digest in enumerate(self._digests) if digest is not None}
        order = [block for block in self._cached if self._digests[block] is not None]
        self._cached = OrderedDict.fromkeys([*order, *self._index.values()])
        self._free = [block for block in range(self.num_blocks - 1, -1, -1) if self._digests[block] is None]
        self._being_computed.clear()

    def reset_prefix_cache(self) -> None:
        """Forget all published blocks that no table holds; blocks in use stay published."""
        for block in self._cached:
            self._unpublish(block)
            self._free.append(block)
        self._cached.clear()

    def _content(self, seq: Sequence, i: int) -> bytes:
        """The tokens of block i, all known, as 8-byte little-endian integers."""
        start = i * self.block_size
        return self._pack(*seq.token_ids[start : start + self.block_size])

    def _digest(self, seq: Sequence, i: int) -> tuple[bytes, bytes]:
        """(digest of block i - 1, digest of block i): xxh3-128 over the former (nothing if i is 0) and the content."""
        parent = seq.block_digests[i - 1] if i else b""
        if i == len(seq.block_digests):
            content = self._content(seq, i)
            seq.block_contents[i:] = [content]  # in place of one whose digest an interrupt has prevented
            seq.block_digests.append(xxh3_128_digest(parent + content))
        return parent, seq.block_digests[i]

    def _unpublish(self, block: int) -> None:
        digest = self._digests[block]
        if digest is not None and self._index.get(digest) == block:
            del self._index[digest]
        self._digests[block] = None
        self._parents[block] = self._contents[block] = b""

    def _no_longer_computing(self, digest: bytes, seq: Sequence) -> None:
        if self._being_computed.get(digest) is seq:
            del self._being_computed[digest]

    # -- inspection ------------------------------------------------------------------------------------------------

    def check_integrity(self, sequences: Iterable[Sequence]) -> list[str]:
        """Sentences for every broken invariant, given all unfinished sequences; an empty list if all is well."""
        sequences = list(sequences)
        problems = []
        references = Counter(block for seq in sequences for block in seq.block_table)
        for block in range(self.num_blocks):
            count = self._ref_counts[block]
            if count != references[block]:
                problems.append(f"block {block} is counted {count} times, but held by {references[block]} tables")
        active = {block for block in range(self.num_blocks) if self._ref_counts[block]}
        free, cached = set(self._free), set(self._cached)
        if len(free) != len(self._free):
            problems.append("a block is in the free list twice")
        if len(active) + len(free) + len(cached) != self.num_blocks or active | free | cached != set(
            range(self.num_blocks)
        ):
            problems.append(f"active {len(active)} + cached {len(cached)} + free {len(free)} != {self.num_blocks}")
        problems += [f"free block {block} is still published" for block in free if self._digests[block] is not None]
        problems += [f"cached block {block} is not published" for block in cached if self._digests[block] is None]
        for seq in sequences:
            for i, block in enumerate(seq.block_table[: seq.num_published_blocks]):
                # A duplicate of a block that was published first stays unpublished itself.
                if self._digests[block] is not None and self._contents[block] != self._content(seq, i):
                    problems.append(f"block {block} does not hold block {i} of {seq.request_id}")
        computing = {id(seq) for seq in sequences if seq.block_table}
        if any(id(seq) not in computing for seq in self._being_computed.values()):
            problems.append("a block counts as being computed by a sequence that is not running")
        for digest, block in self._index.items():
            if self._digests[block] != digest:
                problems.append(f"the index points to block {block}, which holds other content")
            elif xxh3_128_digest(self._parents[block] + self._contents[block]) != digest:
                problems.append(f"block {block}: its digest is not that of its tokens")
        return problems

    def snapshot(self, sequences: Iterable[Sequence]) -> CacheSnapshot:
        """The whole pool as plain data, for inspection; takes time proportional to the pool."""
        unpack = struct.Struct(f"<{self.block_size}q").unpack
        blocks = [
            BlockSnapshot(
                block=block,
                state="active" if self._ref_counts[block] else "cached" if digest is not None else "free",
                refs=self._ref_counts[block],
                digest=digest.hex() if digest is not None else None,
                parent=self._parents[block].hex() or None,
                hits=self._hits[block],
                token_ids=list(unpack(self._contents[block])) if digest is not None else None,
                last_use=self._last_use[block],
            )
            for block, digest in enumerate(self._digests)
        ]
        tables = [
            TableSnapshot(seq.request_id, seq.index, list(seq.block_table), seq.num_computed_tokens)
            for seq in sequences
            if seq.block_table
        ]
        return CacheSnapshot(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            evictions=self.num_evictions,
            blocks=blocks,
            tables=tables,
            next_victims=list(self._cached),
            num_uses=self._num_uses,
        )

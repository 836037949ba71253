"""BlockManager: exact block ids, prefix hits, eviction order, and the public bugs of this class of code."""

from __future__ import annotations

import json

import pytest
from engines import greedy

from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.cache_snapshot import CacheSnapshot
from nanoinfer.engine.sequence import Sequence
from nanoinfer.errors import UserError


def sequence(tokens: list[int], max_new: int = 100) -> Sequence:
    return Sequence(
        "r",
        0,
        tokens,
        greedy(max_new),
        arrival_order=0,
        arrival_time=0.0,
        max_len=len(tokens) + max_new,
        stop_token_ids=frozenset(),
    )


def admit(manager: BlockManager, tokens: list[int], *, publish: bool = True) -> Sequence:
    seq = sequence(tokens)
    manager.allocate(seq, manager.match_prefix(seq))
    if publish:
        manager.publish(seq, len(tokens))
        seq.num_computed_tokens = len(tokens)
    return seq


def test_blocks_are_handed_out_in_order_and_freed_blocks_without_content_first() -> None:
    manager = BlockManager(6, 4)
    a = admit(manager, list(range(9)))
    assert a.block_table == [0, 1, 2]
    manager.free(a)
    # Block 2 was never full, so nothing is lost by using it first; then the blank ones; the cached chain last.
    b = admit(manager, [40] * 17)
    assert b.block_table == [2, 3, 4, 5, 1]
    assert manager.num_evictions == 1


def test_a_chain_loses_its_tail_before_its_head() -> None:
    manager = BlockManager(4, 2)
    manager.free(admit(manager, [1, 2, 3, 4, 5, 6]))
    assert manager.num_cached_blocks == 3
    admit(manager, [9, 9, 8, 8])  # takes the blank block, then the tail (5, 6) of the cached chain
    assert manager.match_prefix(sequence([1, 2, 3, 4, 5, 6, 7])).hit_blocks == [0, 1]


def test_blocks_needed_at_both_sides_of_a_block_boundary() -> None:
    """Seven public reports took an implicit `len % block_size == 1` for a bug; one fork really had it wrong."""
    manager = BlockManager(8, 4)
    seq = admit(manager, [1, 2, 3])
    assert [manager.blocks_needed(seq, n) for n in (0, 1, 2, 5, 6)] == [0, 0, 1, 1, 2]
    seq = admit(manager, [1, 2, 3, 4])
    assert [manager.blocks_needed(seq, n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


@pytest.mark.parametrize("length", [7, 8, 9])
def test_a_full_hit_still_computes_the_last_token(length: int) -> None:
    manager = BlockManager(16, 4)
    tokens = list(range(length))
    admit(manager, tokens)
    again = admit(manager, tokens, publish=False)
    assert again.num_computed_tokens == (length - 1) // 4 * 4 < length
    match = manager.match_prefix(sequence(tokens))
    assert len(match.hit_blocks) == (length - 1) // 4


def test_equal_text_after_a_different_prefix_never_hits() -> None:
    manager = BlockManager(16, 2)
    admit(manager, [1, 2, 5, 6, 7])
    assert manager.match_prefix(sequence([3, 4, 5, 6, 7])).hit_blocks == []
    assert manager.match_prefix(sequence([5, 6, 7])).hit_blocks == []


def test_token_ids_above_a_byte_do_not_collide() -> None:
    """Ids cut to 8 bits before hashing made prompts [65] and [321] the same."""
    manager = BlockManager(8, 1)
    admit(manager, [65, 1])
    assert manager.match_prefix(sequence([321, 1])).hit_blocks == []


def test_a_hash_collision_cannot_return_foreign_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoinfer.engine.block_manager.xxh3_128_digest", lambda data: b"same for all")
    manager = BlockManager(8, 2)
    admit(manager, [1, 2, 3])
    assert manager.match_prefix(sequence([7, 8, 9])).hit_blocks == []
    # Same own tokens, same digest, but another text before them: the stored parent tells them apart.
    monkeypatch.setattr("nanoinfer.engine.block_manager.xxh3_128_digest", lambda data: data[-16:])  # the own tokens
    manager = BlockManager(8, 2)
    admit(manager, [1, 2, 3, 4, 5])
    assert manager.match_prefix(sequence([3, 4, 5])).hit_blocks == []


def test_a_hit_on_a_free_block_takes_it_out_of_the_free_list_and_costs_one() -> None:
    manager = BlockManager(4, 2)
    manager.free(admit(manager, [1, 2, 3, 4, 5]))
    assert manager.num_available_blocks == 4
    match = manager.match_prefix(sequence([1, 2, 3, 4, 9]))
    assert (match.hit_blocks, match.blocks_to_take) == ([0, 1], 3)
    seq = sequence([1, 2, 3, 4, 9])
    manager.allocate(seq, match)
    assert manager.num_available_blocks == 1
    # A second one shares them: only its own last block is taken.
    assert manager.match_prefix(sequence([1, 2, 3, 4, 8])).blocks_to_take == 1
    assert manager.check_integrity([seq]) == []


def test_the_index_forgets_a_block_when_it_is_reused_and_stays_bounded() -> None:
    manager = BlockManager(2, 2)
    for start in range(0, 400, 4):
        manager.free(admit(manager, [start, start + 1, start + 2]))
        assert len(manager._index) <= 2
        assert manager.check_integrity([]) == []
    manager.free(admit(manager, [7, 7, 7, 7]))
    assert manager.match_prefix(sequence([396, 397, 398])).hit_blocks == []


def test_equal_blocks_computed_twice_keep_the_first_in_the_index() -> None:
    manager = BlockManager(8, 2)
    a = admit(manager, [1, 2, 3, 4], publish=False)
    b = admit(manager, [1, 2, 3, 4], publish=False)
    manager.publish(a, 4)
    manager.publish(b, 4)
    manager.free(b)
    assert manager.match_prefix(sequence([1, 2, 3, 4, 5])).hit_blocks == a.block_table
    assert manager.check_integrity([a]) == []
    manager.free(a)
    assert manager.check_integrity([]) == []


def test_a_block_that_another_sequence_is_computing_is_waited_for() -> None:
    manager = BlockManager(8, 2)
    a = admit(manager, [1, 2, 3, 4, 5], publish=False)
    assert manager.match_prefix(sequence([1, 2, 9])).awaits_block
    assert not manager.match_prefix(sequence([2, 1, 9])).awaits_block
    manager.publish(a, 2)
    assert not manager.match_prefix(sequence([1, 2, 9])).awaits_block
    assert manager.match_prefix(sequence([1, 2, 3, 4, 9])).awaits_block
    manager.free(a)  # aborted: nobody computes it any more
    assert not manager.match_prefix(sequence([1, 2, 3, 4, 9])).awaits_block
    assert manager._being_computed == {}


def test_without_prefix_caching_nothing_is_kept() -> None:
    manager = BlockManager(4, 2, enable_prefix_caching=False)
    manager.free(admit(manager, [1, 2, 3, 4]))
    assert (manager.num_cached_blocks, manager.num_available_blocks) == (0, 4)
    assert manager.match_prefix(sequence([1, 2, 3, 4, 5])).hit_blocks == []


def test_reset_forgets_cached_prefixes_but_not_blocks_in_use() -> None:
    manager = BlockManager(8, 2)
    manager.free(admit(manager, [1, 2, 3]))
    used = admit(manager, [4, 5, 6])
    manager.reset_prefix_cache()
    assert manager.num_cached_blocks == 0
    assert manager.match_prefix(sequence([1, 2, 3])).hit_blocks == []
    assert manager.match_prefix(sequence([4, 5, 6])).hit_blocks == used.block_table[:1]
    assert manager.check_integrity([used]) == []


def test_integrity_check_names_what_is_broken() -> None:
    manager = BlockManager(4, 2)
    a = admit(manager, [1, 2, 3, 4, 5])
    assert manager.check_integrity([a]) == []
    assert "counted 1 times, but held by 0" in manager.check_integrity([])[0]
    manager._contents[0] = manager._pack(1, 3)
    assert any("its digest is not that of its tokens" in problem for problem in manager.check_integrity([a]))
    manager.free(a)
    manager._free.append(a.block_table[0] if a.block_table else 0)
    assert any("!= 4" in problem for problem in manager.check_integrity([]))


def test_a_snapshot_survives_json_and_a_damaged_one_is_refused() -> None:
    manager = BlockManager(4, 2)
    a = admit(manager, [1, 2, 3])
    manager.free(admit(manager, [8, 9, 7]))
    snapshot = manager.snapshot([a])
    assert CacheSnapshot.from_json(snapshot.to_json()) == CacheSnapshot.from_json(snapshot.to_json())
    assert [block.state for block in snapshot.blocks].count("active") == 2
    assert snapshot.next_victims == [block.block for block in snapshot.blocks if block.state == "cached"]
    assert snapshot.blocks[a.block_table[0]].token_ids == [1, 2]
    with pytest.raises(UserError, match="not a cache snapshot"):
        CacheSnapshot.from_json({})
    with pytest.raises(UserError, match="damaged"):
        CacheSnapshot.from_json({"schema": "nanoinfer-cache-1", "blocks": []})


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["num_blocks"], "x", 'num_blocks is "x"'), (["block_size"], None, "block_size is null"),
        (["next_victims"], None, "next_victims is null"), (["next_victims"], [1.5], "next_victims is"),
        (["blocks"], 5, "blocks is 5"), (["blocks", 0], 7, "7 stands where fields should be"),
        (["blocks", 0, "block"], [], "block is \\[\\]"), (["blocks", 0, "refs"], "x", 'refs is "x"'),
        (["blocks", 0, "state"], "used", 'state is "used"'), (["blocks", 0, "token_ids"], ["a"], "token_ids is"),
        (["tables", 0, "request_id"], 1, "request_id is 1"), (["num_uses"], None, "num_uses is null"),
        (["engine"], "x", 'engine is "x"'), (["engine"], {"model": "m"}, "engine is"), (["more"], 1, "no field .more"),
    ],
)  # fmt: skip
def test_a_damaged_field_of_a_snapshot_is_named(path: list[str | int], value: object, message: str) -> None:
    """Reports failed somewhere inside."""
    manager = BlockManager(4, 2)
    data = json.loads(json.dumps(manager.snapshot([admit(manager, [1, 2, 3])]).to_json()))
    target = data
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(UserError, match=f"this cache snapshot is damaged: .*{message}"):
        CacheSnapshot.from_json(data)

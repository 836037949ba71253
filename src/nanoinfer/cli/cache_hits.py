"""How much of each prompt the prefix cache had, and where and why the common prefix broke."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from nanoinfer.engine.events import FinishedSequence
from nanoinfer.ui.text import plural

# Of many prompts that began alike, as many are compared to the token; the latest are the likeliest still cached.
MOST_COMPARED = 64

Why = Literal["whole", "tiny", "first", "short", "differs", "answer", "gone", "off"]


@dataclass(frozen=True)
class PrefixBreak:
    """Why a sequence had so many tokens from the cache and not more.

    `common` tokens are the most that it shares with a prompt before it, `other` by its id. `why` is one of: whole (all
    blocks before the last token hit), tiny (there is none, and the last token is always computed), first (nothing began
    alike), short (the common prefix is shorter than a block), differs (within the block after the hits), answer (the
    hits reach into an earlier answer), gone (the next block was in common, but evicted or not there yet), off (no
    prefix cache).
    """

    why: Why
    common: int = 0
    other: str | int | None = None

    def sentence(self, block_size: int) -> str:
        if self.why == "whole":
            return "nothing was missed"
        if self.why == "tiny":
            return f"too short to fill a block of {block_size}"
        if self.why == "first":
            return "no prompt before it began alike"
        if self.why == "off":
            return "prefix caching is off"
        if self.why == "answer":
            return "hits reach into an earlier answer"
        shared = f"{plural(self.common, 'token')} in common with {self.other}"
        if self.why == "short":
            return f"{shared}, less than a block of {block_size}"
        if self.why == "gone":
            return f"{shared}, but blocks were evicted or not there yet"
        return f"differs from {self.other} at token {self.common}"


class PrefixBreaks:
    """Knows all prompts of a run in the order in which they were handed to the engine."""

    def __init__(self, prompts: Mapping[str, Sequence[int]], block_size: int) -> None:
        self._block_size = block_size
        self._ids, self._prompts = list(prompts), list(map(list, prompts.values()))
        self._position = {request_id: i for i, request_id in enumerate(self._ids)}
        self._chains = [self._chain(tokens) for tokens in self._prompts]
        self._behind: dict[int, list[int]] = {}  # hash of a chain of blocks -> the prompts that begin with it
        for i, chain in enumerate(self._chains):
            for key in chain:
                self._behind.setdefault(key, []).append(i)

    def _chain(self, tokens: list[int]) -> list[int]:
        """A hash for nothing, for the first block, for the first two, ... of a prompt."""
        keys = [0]
        for end in range(self._block_size, len(tokens) + 1, self._block_size):
            keys.append(hash((keys[-1], tuple(tokens[end - self._block_size : end]))))
        return keys

    def explain(self, sequence: FinishedSequence, names: Mapping[str, str | int]) -> PrefixBreak:
        """`names` are the ids that a person knows, by the engine's ids."""
        i, size, cached = self._position[sequence.request_id], self._block_size, sequence.cached_tokens
        can_hit = (sequence.prompt_tokens - 1) // size * size
        if cached >= can_hit:
            return PrefixBreak("whole", cached) if can_hit else PrefixBreak("tiny")
        chain = self._chains[i]
        # Sample 2 of a request comes behind its own sample 1.
        before = [j for j in self._behind[chain[cached // size]] if j < i or (j == i and sequence.index)]
        common, other = max(
            ((_common(self._prompts[i], self._prompts[j]), j) for j in before[-MOST_COMPARED:]),
            key=lambda found: (found[0], -found[1]),
            default=(0, -1),
        )
        if not common:
            return PrefixBreak("answer" if cached else "first", cached)
        request_id = self._ids[other]
        why: Why = "gone" if common >= cached + size else "short" if common < size else "differs"
        return PrefixBreak(why, common, names.get(request_id, request_id))


def _common(a: list[int], b: list[int]) -> int:
    """How many leading tokens are equal."""
    length = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        length += 1
    return length

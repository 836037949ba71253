"""The token ids of earlier turns as they were generated, so that the next prompt finds their KV in the prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Ids at an output's end that the kept text may lack: EOS, a stop string, half a character.
_LOOSE_END = 16


@dataclass(frozen=True)
class _Turn:
    encoded: list[int]  # the prompt as the tokenizer encodes it
    prompt: list[int]  # the prompt as it was given to the engine
    output: list[int]


class TokenHistory:
    """A model does not always write a text with the ids that the tokenizer would give it. Where a new prompt goes on
    from an earlier one and repeats its answer word for word, the ids of the answer are put back as they were generated;
    the text is the same, and its KV is found.

    `decode` turns ids into text; `is_special` tells the ids that end a message in the chat template.
    """

    def __init__(self, decode: Callable[[list[int]], str], is_special: Callable[[int], bool]) -> None:
        self._decode = decode
        self._is_special = is_special
        self._turns: list[_Turn] = []  # each turn's `encoded` is a beginning of the next one's

    def prompt(self, encoded: list[int]) -> list[int]:
        """The ids to give to the engine for a prompt that the tokenizer encodes as `encoded`."""
        for turn in reversed(self._turns):
            if _starts_with(encoded, turn.encoded):
                return turn.prompt + self._continuation(turn, encoded[len(turn.encoded) :])
        return encoded

    def _continuation(self, turn: _Turn, rest: list[int]) -> list[int]:
        """What follows the turn's prompt: its answer up to the first special id, then the rest of the conversation."""
        end = next((i for i, token in enumerate(rest) if self._is_special(token)), None)
        if end is None:
            return rest
        answer = self._decode(rest[:end])
        for cut in range(len(turn.output), max(len(turn.output) - _LOOSE_END, 0), -1):
            if self._decode(turn.output[:cut]) == answer and not any(map(self._is_special, turn.output[:cut])):
                return turn.output[:cut] + rest[end:]
        return rest

    def answered(self, encoded: list[int], output: Sequence[int]) -> None:
        """Remember the ids of an answer to the prompt that the tokenizer encodes as `encoded`."""
        turn = _Turn(encoded, self.prompt(encoded), list(output))
        self._turns = [t for t in self._turns if len(t.encoded) < len(encoded) and _starts_with(encoded, t.encoded)]
        self._turns.append(turn)


def _starts_with(ids: list[int], beginning: list[int]) -> bool:
    return ids[: len(beginning)] == beginning

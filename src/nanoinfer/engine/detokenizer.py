"""Token ids to text while they arrive: half characters and possible stop strings are held back, nothing is lost.

Three stages, each a class that can be read alone: IncrementalDecoder (ids to text), StopScanner (text to text that is
safe to show), IncrementalDetokenizer (both for one sequence, with min_tokens and the thinking part). The cost of a
token does not depend on how many came before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

_REPLACEMENT = "\ufffd"
# A UTF-8 character has at most 4 bytes, and a token that decodes to text holds at least one of them.
_MAX_TOKENS_PER_CHARACTER = 4
_MAX_WINDOW = 32  # ids; invalid bytes and ids without text would let the window grow


class IncrementalDecoder:
    """Turns ids into text piece by piece; the pieces joined equal the text of all ids.

    Only a short window of ids is decoded at a time. Its first `_settled` ids are context: decoders such as
    SentencePiece's drop the space before the first id that they see, so a piece is what the new ids add to the
    context's text, never their own decoding. The window only ever starts at a character's edge.

    Exact for byte-level tokenizers and any ids, unless special tokens by the handful stand inside one character. Where
    bytes are single tokens ("byte fallback") and the model writes invalid UTF-8, the characters shown before the bad
    byte stay, while decoding all ids at once may drop them.
    """

    def __init__(self, decode: Decode, prompt_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = _prompt_context(decode, prompt_ids)
        self._settled = len(self._window)
        self._emitted = len(decode(self._window)) if self._window else 0  # characters of the window's text

    def push(self, token_ids: Sequence[int]) -> str:
        """Add ids and return the text that can no longer change."""
        self._window.extend(token_ids)
        end, new = len(self._window), len(self._window) - self._settled
        later = ""  # the text with one more id
        for cut in range(end, end - min(new, _MAX_TOKENS_PER_CHARACTER + 1), -1):
            text = self._decode(self._window[:cut])
            if not text.endswith(_REPLACEMENT):
                return self._settle(cut, text)
            # Single bytes show as one U+FFFD each until the character is complete: a real one made the text shorter.
            if later and len(later) < len(text):
                return self._settle(cut + 1, later)
            later = text
        return self._push_broken() if new > _MAX_TOKENS_PER_CHARACTER else ""

    def _settle(self, cut: int, text: str) -> str:
        """Release `text`, the text of the window up to `cut`; its newest ids become the context of what follows."""
        piece = text[self._emitted :]
        if len(text) > self._emitted:
            del self._window[: self._settled]
            self._settled = cut - self._settled
        elif self._emitted == 0 and cut < _MAX_WINDOW:
            self._settled = cut  # before the first text even a lone "▁" counts: it takes the space that is dropped
        else:
            # Ids without text (skipped special tokens) must not become the context: it would show no space.
            del self._window[self._settled : cut]
            return piece  # what was emitted may reach beyond them, into invalid bytes
        self._emitted = len(self._decode(self._window[: self._settled]))
        return piece

    def _push_broken(self) -> str:
        # So many ids cannot be one unfinished character: these are real U+FFFDs or invalid bytes, and only the last
        # of them can still become something else.
        text = self._decode(self._window)
        piece = text[self._emitted : -1]
        self._emitted = max(self._emitted, len(text) - 1)
        if len(self._window) < _MAX_WINDOW:
            return piece
        for cut in range(len(self._window) - 2, len(self._window) - 2 - 2 * _MAX_TOKENS_PER_CHARACTER, -1):
            head, tail = self._decode(self._window[:cut]), self._decode(self._window[cut:])
            # With two characters after the cut, the one that may still change lies wholly behind it.
            if head + tail == text and len(tail) >= 2:
                self._window = self._window[cut:]
                self._settled, self._emitted = 0, len(tail) - 1
                return piece
        # Half a character and then ids without text: nothing will complete it.
        self._window, self._settled, self._emitted = [], 0, 0
        return piece + text[-1:]

    def flush(self) -> str:
        """Return the text that was held back, as it is."""
        text = self._decode(self._window)[self._emitted :] if self._window else ""
        self._window, self._settled, self._emitted = [], 0, 0
        return text


def _prompt_context(decode: Decode, prompt_ids: Sequence[int]) -> list[int]:
    """The prompt's last ids that are whole characters. A special token alone will do: a text starts anew after it."""
    for length in range(1, min(len(prompt_ids), _MAX_TOKENS_PER_CHARACTER) + 1):
        context = list(prompt_ids[-length:])
        if _REPLACEMENT not in decode(context):
            return context
    return []


class StopScanner:
    """Finds stop strings in a text that comes in pieces, and holds back any suffix that could still become one.

    The stop string that ends first wins, of those that end at the same character the longest: the result is the same
    as if the text came character by character, however it is cut into pieces.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._first_characters = frozenset(text[0] for text in stop)
        self._longest = max(map(len, stop), default=0)
        self.held = ""

    def push(self, text: str, *, counts: bool) -> tuple[str, str | None]:
        """Return the text that is safe to show and the stop string that was found, if one was.

        counts: whether a stop string that ends in `text` ends the sequence (false while min_tokens is not reached).
        """
        buffer = self.held + text
        if counts:
            found = [
                (at + len(stop), at, stop)
                for stop in self._stop
                # A match that ends in what was held already was seen, and did not count.
                if (at := buffer.find(stop, max(0, len(self.held) - len(stop) + 1))) >= 0
            ]
            if found:
                _, start, stop = min(found)
                self.held = ""
                return buffer[:start], stop
        keep = self._possible_start(buffer)
        self.held = buffer[keep:]
        return buffer[:keep], None

    def _possible_start(self, buffer: str) -> int:
        """Where the longest suffix of `buffer` begins that is the beginning, but not the whole, of a stop string."""
        for start in range(max(0, len(buffer) - self._longest + 1), len(buffer)):
            if buffer[start] in self._first_characters:
                suffix = buffer[start:]
                if any(len(stop) > len(suffix) and stop.startswith(suffix) for stop in self._stop):
                    return start
        return len(buffer)


class IncrementalDetokenizer:
    """The growing text of one sequence. The pieces that `append` and `finish` return, joined, are `text`.

    decode: ids to text, special tokens left out. prompt_ids: the sequence's prompt, for the space before its first
    word. stop: strings that end the sequence and are cut off together with what follows. min_tokens: a stop string
    counts only if it is completed by a later token than the min_tokens-th. thinking: the two markers between which a
    model thinks, each one token of it; stop strings do not count before the closing one, where the prompt ends with
    the opening one or the output starts with it.

    Append only tokens that belong to the text: not the EOS or stop token that ended the sequence.
    """

    def __init__(
        self,
        decode: Decode,
        prompt_ids: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        thinking: tuple[str, str] | None = None,
    ) -> None:
        self._decoder = IncrementalDecoder(decode, prompt_ids)
        self._scanner = StopScanner(stop) if stop else None
        self._min_tokens = min_tokens
        self._thinking = thinking
        self._in_thinking = thinking is not None and _ends_with_marker(decode, prompt_ids, thinking[0])
        self._pieces: list[str] = []
        self.num_tokens = 0  # that were appended, up to and including the one that completed the stop string
        self.stopped: str | None = None  # the stop string that was found

    @property
    def text(self) -> str:
        """All text released so far, without the stop string."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def append(self, token_ids: Sequence[int]) -> str:
        """Add output tokens and return the text that they release, often of earlier tokens. Nothing after a stop."""
        if self._scanner is None:
            self.num_tokens += len(token_ids)
            return self._release(self._decoder.push(token_ids))
        released = []
        for token_id in token_ids:
            if self.stopped is not None:
                break
            self.num_tokens += 1
            released.append(self._scan(self._decoder.push([token_id]), self._scanner))
        return self._release("".join(released))

    def finish(self) -> str:
        """End the sequence: return what was held back. A stop string that only this completes counts as well."""
        if self.stopped is not None:
            return ""
        rest = self._decoder.flush()
        if self._scanner is not None:
            rest = self._scan(rest, self._scanner)
            if self.stopped is None:
                rest += self._scanner.held
                self._scanner.held = ""
        return self._release(rest)

    def _release(self, text: str) -> str:
        if text:
            self._pieces.append(text)
        return text

    def _scan(self, text: str, scanner: StopScanner) -> str:
        if self._thinking is None or not text:
            thought = ""
        else:
            thought, text = self._split_thinking(text, *self._thinking)
        released, self.stopped = scanner.push(text, counts=self.num_tokens > self._min_tokens)
        return thought + released

    def _split_thinking(self, text: str, opening: str, closing: str) -> tuple[str, str]:
        """Split one token's text into what stop strings do not apply to, and the rest. A marker is never cut."""
        if not self._in_thinking and text.startswith(opening):
            self._in_thinking = True
        if not self._in_thinking:
            self._thinking = None  # the answer has begun: no marker means anything from here on
            return "", text
        end = text.find(closing)
        if end < 0:
            return text, ""
        self._thinking = None
        return text[: end + len(closing)], text[end + len(closing) :]


def _ends_with_marker(decode: Decode, prompt_ids: Sequence[int], marker: str) -> bool:
    # A marker is one token; the others are more than the blank lines that templates write behind it.
    return decode(list(prompt_ids[-8:])).rstrip().endswith(marker)

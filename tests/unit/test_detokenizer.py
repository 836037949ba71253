"""Incremental text equals the text of all ids, whatever the ids, the pieces and the stop strings."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from thoroughness import examples, some

from nanoinfer.engine.detokenizer import IncrementalDecoder, IncrementalDetokenizer, StopScanner

# Ids 0 to 255 are bytes, the following ones whole pieces as a byte-level BPE has them, cut anywhere in a character.
PIECES = [
    b"Ahoj",
    " světe".encode(),
    "สวัส".encode(),
    "你好".encode(),
    "👩\u200d👩\u200d👧".encode(),
    "😀".encode()[:2],
    "😀".encode()[2:],
    "你".encode()[:1],
    b" ",
    b"\n",
    "\ufffd".encode(),
    b"<think>",
    b"</think>",
]
SPECIAL = 256 + len(PIECES)  # a special token: decodes to nothing
THINK, END_THINK = 256 + PIECES.index(b"<think>"), 256 + PIECES.index(b"</think>")


def decode_bytes(ids: list[int]) -> str:
    data = b"".join(bytes([i]) if i < 256 else PIECES[i - 256] for i in ids if i != SPECIAL)
    return data.decode(errors="replace")


def decode_fallback(ids: list[int]) -> str:
    """SentencePiece with byte fallback: ids 0 to 255 are bytes, others are words; the first space is dropped.

    A run of bytes that is not valid UTF-8 becomes one U+FFFD per byte, as the tokenizers library has it.
    """
    words = ["▁Hello", "▁world", "▁", "ing", "▁你"]
    text, run = "", b""
    for i in [*ids, None]:
        if i is not None and i < 256:
            run += bytes([i])
            continue
        try:
            text += run.decode()
        except UnicodeDecodeError:
            text += "\ufffd" * len(run)
        run = b""
        if i is not None and i != SPECIAL:
            text += words[i - 256]
    return text.replace("▁", " ").removeprefix(" ")


def stream(ids: Sequence[int], cuts: Sequence[int], decode: Callable[[list[int]], str] = decode_bytes) -> list[str]:
    decoder = IncrementalDecoder(decode)
    bounds = [0, *sorted({c for c in cuts if c < len(ids)}), len(ids)]
    pieces = [decoder.push(ids[a:b]) for a, b in itertools.pairwise(bounds)]
    return [*pieces, decoder.flush()]


any_ids = st.lists(st.integers(0, SPECIAL), max_size=60)
broken_ids = st.lists(st.sampled_from([0xE4, 0xEF, 0xBF, 0xBD, 0xFF, 0x41, 256 + 7, 256 + 10, SPECIAL]), max_size=90)
any_cuts = st.lists(st.integers(1, 60), max_size=60)
every_token = range(1, 100)


@settings(max_examples=examples(30), deadline=None)
@given(any_ids, any_cuts)
@example([256 + 5, SPECIAL, 256 + 6], [1, 2])
def test_streamed_text_equals_the_text_of_all_ids_for_any_ids_and_pieces(ids: list[int], cuts: list[int]) -> None:
    assert "".join(stream(ids, cuts)) == decode_bytes(ids)


@settings(max_examples=examples(30), deadline=None)
@given(broken_ids)
def test_invalid_bytes_stream_to_the_same_replacement_characters(ids: list[int]) -> None:
    assert "".join(stream(ids, every_token)) == decode_bytes(ids)


def test_a_long_row_of_replacement_characters_in_single_bytes_streams_exactly() -> None:
    ids = list("\ufffd".encode()) * 40
    for lead in ([], [0xFF], [0xFF, 0xE4]):
        assert "".join(stream([*lead, *ids], range(200))) == decode_bytes([*lead, *ids])
    for length in some(range(40)):
        ids = [0xFF] * length + list("😀".encode())
        assert "".join(stream(ids, every_token)) == decode_bytes(ids)


def test_a_special_token_among_many_invalid_bytes_repeats_nothing() -> None:
    ids = [*[0xFF] * 30, SPECIAL, 256 + 6, 0xFF]  # the window of undecided ids is cut before the special token
    assert "".join(stream(ids, every_token)) == decode_bytes(ids)


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.sampled_from([256, 257, 258, 259, 260, *" až你好😀\n\ufffd"]), max_size=20), any_cuts)
@example(["\ufffd", "你"], [])
def test_byte_fallback_text_streams_exactly(parts: list[int | str], cuts: list[int]) -> None:
    ids = [i for part in parts for i in (part.encode() if isinstance(part, str) else [part])]
    assert "".join(stream(ids, cuts, decode_fallback)) == decode_fallback(ids)
    assert "".join(stream(ids, every_token, decode_fallback)) == decode_fallback(ids)


@pytest.mark.parametrize(
    "text", ["😀", "你好，世界", "Příliš žluťoučký kůň", "สวัสดีครับ", "👩\u200d👩\u200d👧", "e\u0301"]
)
def test_half_a_character_is_never_streamed_as_a_replacement_character(text: str) -> None:  # pitfall 44
    pieces = stream(list(text.encode()), every_token)
    assert "".join(pieces) == text
    assert [piece for piece in pieces if piece] == list(text)
    assert pieces[-1] == ""


def test_a_character_split_over_tokens_comes_with_its_last_byte() -> None:
    detokenizer = IncrementalDetokenizer(decode_bytes)
    assert [detokenizer.append([byte]) for byte in "a😀b".encode()] == ["a", "", "", "", "😀", "b"]


def test_an_unfinished_character_and_a_real_replacement_character_come_out_at_the_flush() -> None:
    for ids, text in ([0x41, 0xF0, 0x9F], "A\ufffd"), ([0x41, *"\ufffd".encode()], "A\ufffd"):
        detokenizer = IncrementalDetokenizer(decode_bytes)
        assert "".join(detokenizer.append([i]) for i in ids) == "A"
        assert detokenizer.finish() == "\ufffd"
        assert detokenizer.finish() == ""
        assert detokenizer.text == text


def test_space_between_words_is_not_lost() -> None:  # pitfall 46
    ids = [256, 257, SPECIAL, 257, 258, 257, 259]
    assert decode_fallback([257]) == "world", "alone, a word has no space: decoding token by token would lose it"
    assert stream(ids, every_token, decode_fallback)[:4] == ["Hello", " world", "", " world"]
    assert "".join(stream(ids, every_token, decode_fallback)) == "Hello world world  worlding"


def test_the_first_word_keeps_its_space_after_a_prompt_but_not_after_a_special_token() -> None:
    assert IncrementalDetokenizer(decode_fallback, [256]).append([257]) == " world"
    assert IncrementalDetokenizer(decode_fallback, [256, SPECIAL]).append([257]) == "world"
    assert IncrementalDetokenizer(decode_fallback, []).append([257]) == "world"


def test_a_lone_space_before_the_first_word_counts() -> None:
    for ids in [258, 257], [SPECIAL, 258, 257], [258, SPECIAL, 257]:
        assert "".join(stream(ids, every_token, decode_fallback)) == decode_fallback(ids) == " world"


def test_byte_tokens_after_a_prompt_of_byte_tokens_are_read_apart_from_it() -> None:
    detokenizer = IncrementalDetokenizer(decode_fallback, [256, *"你".encode()])
    assert [detokenizer.append([i]) for i in "好".encode()] == ["", "", "好"]


def test_a_prompt_that_ends_inside_a_character_does_not_leak_into_the_output() -> None:
    prompt, output = list("Hi 你".encode()[:-1]), list("ok 你".encode())
    detokenizer = IncrementalDetokenizer(decode_bytes, prompt)
    assert "".join(detokenizer.append([i]) for i in output) + detokenizer.finish() == "ok 你"


@pytest.mark.parametrize("token", [0x41, 256 + 10, 0xFF, SPECIAL], ids=["text", "U+FFFD", "invalid byte", "special"])
def test_cost_of_a_token_does_not_grow_with_the_length_of_the_text(token: int) -> None:
    decoded = 0

    def decode(ids: list[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return decode_bytes(ids)

    decoder = IncrementalDecoder(decode)
    length = examples(3000)
    for i in [token, 0x41, 0xE4, *[token] * length]:
        decoder.push([i])
    assert decoded < length * 150, "ids decoded: a short window for each token, not the whole text"


def reference_stop(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """Character by character: the first prefix of the text that ends with a stop string."""
    for end in range(1, len(text) + 1):
        hits = [s for s in stop if text[:end].endswith(s)]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


few = st.text("abc", min_size=1, max_size=5)


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.text("abc", max_size=4), max_size=12), st.lists(few, min_size=1, max_size=3))
@example(["abc"], ["c", "b", "ab"])
def test_stop_string_is_found_and_cut_exactly_wherever_the_pieces_are_cut(pieces: list[str], stop: list[str]) -> None:
    scanner, shown, found = StopScanner(stop), "", None
    for piece in pieces:
        released, found = scanner.push(piece, counts=True)
        shown += released
        if found:
            break
        held = scanner.held
        assert any(s.startswith(held) and s != held for s in stop), "only what could begin a stop string is held"
    expected, expected_stop = reference_stop("".join(pieces), stop)
    assert (shown + ("" if found else scanner.held), found) == (expected, expected_stop)


def test_stop_string_over_token_boundaries_never_leaks_its_head() -> None:  # pitfall 47
    detokenizer = IncrementalDetokenizer(decode_bytes, stop=("DEFGHIJ",))
    tokens = [list(part.encode()) for part in ("ABC", "DEF", "G", "HI", "JKL")]
    assert [detokenizer.append(ids) for ids in tokens] == ["ABC", "", "", "", ""]
    assert detokenizer.stopped == "DEFGHIJ"
    assert detokenizer.finish() == ""
    assert detokenizer.text == "ABC"
    assert detokenizer.num_tokens == len("ABCDEFGHIJ"), "tokens after the stop string do not count"
    assert detokenizer.append(list(b"more")) == ""


def test_text_that_only_began_like_a_stop_string_is_released() -> None:
    detokenizer = IncrementalDetokenizer(decode_bytes, stop=("\nUser:",))
    assert [detokenizer.append([i]) for i in b"a\nUs"] == ["a", "", "", ""]
    assert detokenizer.append([ord("x")]) == "\nUsx"
    assert detokenizer.append([ord("\n")]) == ""
    assert detokenizer.finish() == "\n"
    assert detokenizer.text == "a\nUsx\n"
    assert detokenizer.stopped is None


def test_stop_string_counts_only_when_completed_after_min_tokens() -> None:
    for min_tokens, text, stopped in (0, "", "ab"), (2, "ab", "ab"), (3, "ab", "ab"), (4, "abab", None):
        detokenizer = IncrementalDetokenizer(decode_bytes, stop=("ab",), min_tokens=min_tokens)
        for ids in (b"a", b"ba", b"b"):
            detokenizer.append(list(ids))
        detokenizer.finish()
        assert (detokenizer.text, detokenizer.stopped) == (text, stopped), min_tokens


def test_stop_string_that_does_not_count_yet_is_not_held_back_nor_found_later() -> None:
    detokenizer = IncrementalDetokenizer(decode_bytes, stop=("ab", "a longer one"), min_tokens=3)
    assert detokenizer.append(list(b"ab")) == "ab"
    detokenizer = IncrementalDetokenizer(decode_bytes, stop=("xaby", "ab"), min_tokens=3)
    assert [detokenizer.append([i]) for i in b"xab"] == ["", "", ""], "xaby may still come"
    assert detokenizer.append(list(b"z")) == "xabz"
    assert detokenizer.stopped is None


@settings(max_examples=examples(30), deadline=None)
@given(
    any_ids,
    any_cuts,
    st.lists(st.sampled_from(["A", "hoj", "你", "\n", " s", "\ufffd"]), max_size=3),
    st.integers(0, 8),
)
def test_any_chunking_of_the_tokens_gives_the_same_text_stop_and_count(
    ids: list[int], cuts: list[int], stop: list[str], min_tokens: int
) -> None:
    results = []
    for where in (every_token, cuts, []):
        detokenizer = IncrementalDetokenizer(decode_bytes, stop=stop, min_tokens=min_tokens)
        bounds = [0, *sorted({c for c in where if c < len(ids)}), len(ids)]
        pieces = [detokenizer.append(ids[a:b]) for a, b in itertools.pairwise(bounds)]
        assert "".join([*pieces, detokenizer.finish()]) == detokenizer.text
        results.append((detokenizer.text, detokenizer.stopped, detokenizer.num_tokens))
    assert results[0] == results[1] == results[2]
    if min_tokens == 0:
        assert results[0][:2] == reference_stop(decode_bytes(ids), stop)


MARKERS = ("<think>", "</think>")


@pytest.mark.parametrize(
    ("prompt", "output"),
    [
        ([], [THINK, *b"a.b", END_THINK]),
        ([THINK, 256 + 9], [*b"a.b", END_THINK]),
        ([THINK, 256 + 9, END_THINK, 256 + 9], []),
        (list(b"What is <think>?"), []),
    ],
    ids=["model opens", "prompt opens", "prompt switches off", "user mentions it"],
)
def test_stop_strings_apply_to_the_answer_and_markers_come_whole(prompt: list[int], output: list[int]) -> None:
    # pitfall 48: a stop string inside the thinking ended the answer before it began
    detokenizer = IncrementalDetokenizer(decode_bytes, prompt, stop=(".", "nk>x"), thinking=MARKERS)
    pieces = [detokenizer.append([i]) for i in [*output, *b"x.y"]]
    assert detokenizer.stopped == "."
    assert detokenizer.text == decode_bytes(output) + "x"
    assert [piece for piece in pieces if "think" in piece] == [m for m in MARKERS if m in decode_bytes(output)]


def test_without_markers_stop_strings_apply_to_everything() -> None:
    detokenizer = IncrementalDetokenizer(decode_bytes, stop=(".",))
    detokenizer.append([THINK, *b"a.b", END_THINK])
    assert (detokenizer.text, detokenizer.num_tokens) == ("<think>a", 3)


def test_unfinished_thinking_keeps_its_text() -> None:
    detokenizer = IncrementalDetokenizer(decode_bytes, stop=(".",), thinking=MARKERS)
    detokenizer.append([THINK, *b"a. b", 0xF0])
    detokenizer.finish()
    assert detokenizer.text == "<think>a. b\ufffd"
    assert detokenizer.stopped is None


def test_last_token_is_kept_at_max_tokens() -> None:  # pitfall 43
    detokenizer = IncrementalDetokenizer(decode_bytes, stop=("zzz",))
    assert "".join(detokenizer.append([i]) for i in b"abz") + detokenizer.finish() == "abz"


def test_no_regular_expression_meaning_in_stop_strings() -> None:
    detokenizer = IncrementalDetokenizer(decode_bytes, stop=(".*", "[x]"))
    assert detokenizer.append(list(b"ab[x]")) == "ab"
    assert re.match(detokenizer.stopped or "", "x")

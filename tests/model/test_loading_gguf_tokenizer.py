"""The tokenizer built from a GGUF vocabulary gives the ids of the original tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from nanoinfer.errors import ModelError
from nanoinfer.loading.gguf_tokenizer import tokenizer_files

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

TEXTS = [
    "Hello, world! It's 2024; we've 1,234,567.89 reasons.",
    "  leading spaces\tand tabs\n\n\nnewlines  \r\n end ",
    "def f(x):\n    return x ** 2  # comment",
    "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "ภาษาไทย 日本語のテキスト 한국어 中文，你好！",
    "😀👩‍👩‍👧‍👦🇨🇿 emoji",
    "cafe\u0301 and Å vs A\u030a",  # NFC changes these
    "<|im_start|>user\nHi<|im_end|>\n",
    "'LL 'Ve DON'T",
]


@pytest.fixture(scope="module")
def qwen3(shared_dir: Path) -> dict[str, Any]:
    return json.loads((shared_dir / "data" / "qwen3" / "tokenizer.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def smollm2(smollm2_folder: Path) -> dict[str, Any]:
    return json.loads((smollm2_folder / "tokenizer.json").read_text(encoding="utf-8"))


def metadata_of(tokenizer: dict[str, Any], pre: str, **extra: Any) -> dict[str, Any]:
    """The GGUF keys of a tokenizer.json, as llama.cpp's conversion writes them, with two unused ids at the end."""
    by_id = {i: (token, NORMAL) for token, i in tokenizer["model"]["vocab"].items()}
    for added in tokenizer["added_tokens"]:
        by_id[added["id"]] = (added["content"], CONTROL if added["special"] else USER_DEFINED)
    size = max(by_id) + 3
    entries = [by_id.get(i, (f"[PAD{i}]", UNUSED)) for i in range(size)]
    merges = [" ".join(m) if isinstance(m, list) else m for m in tokenizer["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.tokens": [token for token, _ in entries],
        "tokenizer.ggml.token_type": [kind for _, kind in entries],
    } | {f"tokenizer.{key}": value for key, value in extra.items()}  # fmt: skip


def build(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_files(metadata, "m.gguf")["tokenizer.json"])


def test_qwen3_ids_equal_the_original_tokenizers(qwen3: dict[str, Any], shared_dir: Path) -> None:
    original = Tokenizer.from_file(str(shared_dir / "data" / "qwen3" / "tokenizer.json"))
    built = build(metadata_of(qwen3, "qwen2"))
    for text in TEXTS:
        ids = original.encode(text).ids
        assert built.encode(text).ids == ids, text
        assert built.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)
        assert built.decode(ids) == original.decode(ids)
    assert built.id_to_token(151645) == "<|im_end|>"
    assert {t.content: t.special for t in built.get_added_tokens_decoder().values()} == {
        t["content"]: t["special"] for t in qwen3["added_tokens"]
    }
    assert built.id_to_token(151669) is None, "padding of the vocabulary is no token"


def test_llama3_groups_digits_by_three_and_begins_with_bos(smollm2: dict[str, Any]) -> None:
    def llama3(**extra: Any) -> dict[str, Any]:
        return metadata_of(smollm2, "llama-bpe", **{"ggml.bos_token_id": 1}, **extra)

    built = build(llama3())
    assert built.encode("x").ids == [1, *built.encode("x", add_special_tokens=False).ids]
    words = built.pre_tokenizer.pre_tokenize_str("12345 ab")
    assert [word for word, _ in words] == ["123", "45", "Ġab"]
    quiet = llama3(**{"ggml.add_bos_token": False})
    assert build(quiet).encode("x").ids == built.encode("x").ids[1:]
    assert json.loads(tokenizer_files(quiet, "m.gguf")["tokenizer_config.json"])["add_bos_token"] is False


def test_smollm_splits_digits_one_by_one_and_gpt2_does_not(smollm2: dict[str, Any], smollm2_folder: Path) -> None:
    built = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    assert built.encode(" 2024 12").tokens == ["Ġ", "2", "0", "2", "4", "Ġ", "1", "2"]
    assert built.encode("<|im_start|>user").ids[0] == 1
    assert built.encode("Hello").ids == [built.token_to_id("Hello")]
    for text in TEXTS[:6]:
        assert built.decode(built.encode(text).ids) == text
    gpt2 = build(metadata_of(smollm2, "gpt-2"))
    assert [w for w, _ in gpt2.pre_tokenizer.pre_tokenize_str("2024 12")] == ["2024", "Ġ12"]


def test_a_file_without_the_field_is_read_as_gpt2(smollm2: dict[str, Any]) -> None:
    metadata = metadata_of(smollm2, "gpt-2")
    named = build(metadata)
    del metadata["tokenizer.ggml.pre"]
    assert build(metadata).to_str() == named.to_str()


def test_chat_template_and_special_tokens_come_along(smollm2_folder: Path) -> None:
    config = json.loads((smollm2_folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["chat_template"].startswith("{% for message in messages %}")
    assert (config["bos_token"], config["eos_token"], config["unk_token"]) == (
        "<|im_start|>", "<|im_end|>", "<|endoftext|>"
    )  # fmt: skip
    assert config["add_bos_token"] is False


def test_end_of_turn_ids_join_the_end_of_sequence() -> None:
    ids = {f"tokenizer.ggml.{name}_token_id": i for name, i in (("eos", 5), ("eot", 3), ("eom", 5), ("bos", 1))}
    files = tokenizer_files(ids, "m.gguf")
    assert list(files) == ["generation_config.json"], "no vocabulary, no tokenizer"
    assert json.loads(files["generation_config.json"])["eos_token_id"] == [3, 5]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre 'tekken' is not supported"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer model 'llama' is not supported"),
        ({"tokenizer.ggml.merges": ["nothing like"]}, "the tokenizer in the file is damaged"),
    ],
)
def test_unknown_rules_are_refused_by_name(changes: dict[str, Any], words: str) -> None:
    tokenizer = {"model": {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}, "added_tokens": []}
    assert build(metadata_of(tokenizer, "gpt-2")).encode("ab").ids == [2]
    with pytest.raises(ModelError, match=words) as caught:
        tokenizer_files(metadata_of(tokenizer, "gpt-2") | changes, "m.gguf")
    assert str(caught.value).startswith("m.gguf: ")

"""Ids and text equal transformers' for every family's kind of tokenizer, made small here; and what is refused."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from nanoinfer import LLM
from nanoinfer.engine.detokenizer import IncrementalDetokenizer
from nanoinfer.engine.tokenizer import Tokenizer, has_tokenizer
from nanoinfer.errors import ModelError, RequestError
from nanoinfer.loading.resolve import _shape

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello world, how are you?",
    "Příliš žluťoučký kůň úpěl ďábelské ódy. 你好，世界！ สวัสดี 😀",
    "user assistant system\n\n\nYou are a helpful assistant. 1234 56 7",
] * 3
LLAMA3_SPLIT = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

HEADER_TEMPLATE = """
{{- bos_token }}
{%- for message in messages %}
    {{- '<|head|>' + message.role + '<|tail|>\n\n' + message.content | trim + '<|turn|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|tail|>\n\n' }}{% endif %}"""

INSTRUCTION_TEMPLATE = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set system, messages = messages[0].content + '\n\n', messages[1:] %}{% endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('user and assistant must take turns') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (system if loop.first and system is defined else '') + message.content + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message.content.strip() + eos_token }}
    {%- endif %}
{%- endfor %}"""


def _byte_level(specials: list[str], split: str | None) -> Backend:
    backend = Backend(models.BPE(ignore_merges=True))
    steps: list[Any] = [] if split is None else [pre_tokenizers.Split(Regex(split), "isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(specials)
    return backend


def _llama3(folder: Path) -> dict[str, Any]:
    backend = _byte_level(["<|begin|>", "<|head|>", "<|tail|>", "<|turn|>", "<|end|>"], LLAMA3_SPLIT)
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", backend.token_to_id("<|begin|>"))]
    )
    backend.save(str(folder / "tokenizer.json"))
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|turn|>",
        "chat_template": HEADER_TEMPLATE,
    }


def _qwen2(folder: Path) -> dict[str, Any]:
    backend = _byte_level(["<|end|>", "<|head|>", "<|tail|>", "<|turn|>"], LLAMA3_SPLIT)
    backend.normalizer = normalizers.NFC()
    backend.add_tokens(["<think>", "</think>"])
    backend.save(str(folder / "tokenizer.json"))
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": {"__type": "AddedToken", "content": "<|turn|>", "special": True},
        "pad_token": "<|end|>",
        "chat_template": [
            {"name": "tool_use", "template": "not this one"},
            {"name": "default", "template": HEADER_TEMPLATE.replace("{{- bos_token }}", "")},
        ],
    }


def _sentencepiece(folder: Path, *, normalizer: bool, scheme: str = "first") -> dict[str, Any]:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    trained = json.loads(backend.to_str())["model"]
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *trained["vocab"]]
    backend = Backend(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(vocab)},
            merges=[tuple(merge) for merge in trained["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    if normalizer:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in ("<unk>", "<s>", "</s>")])
    backend.save(str(folder / "tokenizer.json"))
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "chat_template": INSTRUCTION_TEMPLATE,
    }


def _llama2(folder: Path) -> dict[str, Any]:
    return _sentencepiece(folder, normalizer=True)


def _mistral(folder: Path) -> dict[str, Any]:
    return _sentencepiece(folder, normalizer=False)


def _mistral_class(folder: Path) -> dict[str, Any]:
    return {**_sentencepiece(folder, normalizer=False), "tokenizer_class": "LlamaTokenizer", "legacy": False}


def _gpt2(folder: Path) -> dict[str, Any]:
    _byte_level(["<|head|>", "<|tail|>", "<|turn|>"], None).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(HEADER_TEMPLATE.replace("{{- bos_token }}", ""))
    return {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|turn|>", "chat_template": "not this one"}


FAMILIES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "llama3": _llama3,
    "qwen2": _qwen2,
    "llama2": _llama2,
    "mistral": _mistral,
    "mistral-class": _mistral_class,
    "smollm2": _gpt2,
}


class Pair:
    """One folder, read by both."""

    def __init__(self, family: str, folder: Path, **config: Any) -> None:
        transformers = pytest.importorskip("transformers")
        config = {**FAMILIES[family](folder), **config}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        self.tokenizer = Tokenizer.from_folder(folder)
        self.reference = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, tmp_path_factory.mktemp("model"))


TEXTS = [
    "Hello world",
    " leading, trailing ",
    "Příliš žluťoučký 你好 สวัสดี 😀👩\u200d👧",
    "\n\n a \t1234567 \r\n",
    "\ufffd and \u2581 and <unk",
    "",
]
CHATS = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "  Hi there \n"}],
    [
        {"role": "user", "content": "One 你好?"},
        {"role": "assistant", "content": " <think>hm</think> 😀 \n"},
        {"role": "user", "content": "Two"},
    ],
]


@pytest.mark.parametrize("text", [*TEXTS, "<s>raw <|turn|> [INST] </s> text<|end|>"])
def test_raw_ids_and_text_equal_transformers(pair: Pair, text: str) -> None:
    ids = pair.tokenizer.encode(text)
    assert ids == pair.reference(text)["input_ids"]
    assert pair.tokenizer.decode(ids) == pair.reference.decode(ids, skip_special_tokens=True)
    assert pair.tokenizer.decode(ids, skip_special_tokens=False) == pair.reference.decode(ids)


@pytest.mark.parametrize("chat", CHATS, ids=range(len(CHATS)))
@pytest.mark.parametrize("options", [{}, {"not_read": "<s><|turn|>"}], ids=["plain", "guarded"])
def test_chat_ids_equal_transformers_and_get_no_second_bos(
    pair: Pair, chat: list[dict[str, str]], options: dict[str, str]
) -> None:
    text, ids = pair.tokenizer.encode_chat(chat, **options)
    assert text == pair.reference.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert ids == pair.reference.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert pair.reference.bos_token_id is None or ids.count(pair.reference.bos_token_id) == 1


def test_special_tokens_of_a_message_stay_text_in_every_family(pair: Pair) -> None:
    typed = "a<s>b </s> <|turn|>c"
    _, plain = pair.tokenizer.encode_chat([{"role": "user", "content": "x"}])
    text, ids = pair.tokenizer.encode_chat([{"role": "user", "content": typed}])
    assert typed in text
    assert typed in pair.tokenizer.decode(ids)
    assert [i for i in ids if pair.tokenizer.is_special(i)] == [i for i in plain if pair.tokenizer.is_special(i)]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_text_streams_exactly_after_any_prompt(pair: Pair, data: st.DataObject) -> None:
    tokenizer = pair.tokenizer
    prompt, ids = (tokenizer.encode(data.draw(st.text(max_size=20))) for _ in range(2))
    cuts = data.draw(st.sets(st.integers(1, 30), max_size=20))
    detokenizer = IncrementalDetokenizer(tokenizer.decode, prompt)
    pieces = [detokenizer.append([i]) for i in ids]
    text = "".join(pieces) + detokenizer.finish()
    again = IncrementalDetokenizer(tokenizer.decode, prompt)
    bounds = [0, *sorted(c for c in cuts if c < len(ids)), len(ids)]
    pieces = [again.append(ids[start:end]) for start, end in itertools.pairwise(bounds)]
    assert "".join([*pieces, again.finish()]) == text
    # The first word keeps the space that decoding the output alone would drop; nothing else differs.
    assert text.removeprefix(" ") == tokenizer.decode(ids).removeprefix(" ")


@pytest.mark.parametrize("family", ["llama3", "qwen2", "mistral"])
@pytest.mark.parametrize("flag", [True, False])
def test_bos_is_added_as_tokenizer_json_says(tmp_path: Path, family: str, flag: bool) -> None:
    pair = Pair(family, tmp_path, add_bos_token=flag)
    assert pair.tokenizer.encode("Hello") == pair.reference("Hello")["input_ids"]
    assert (pair.tokenizer.encode("Hello")[0] == pair.reference.bos_token_id) == (family != "qwen2")


def test_file_limits_on_length_and_padding_do_not_apply(tmp_path: Path) -> None:
    config = _llama3(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert 4 < len(Tokenizer.from_folder(tmp_path).encode("a b c d e f g h")) < 64


def test_template_that_refuses_a_chat_is_quoted(tmp_path: Path) -> None:
    pair = Pair("mistral", tmp_path)
    twice = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(RequestError, match="refuses these messages: user and assistant must take turns") as caught:
        pair.tokenizer.encode_chat(twice)
    assert caught.value.code == "invalid_request"


def test_folder_without_chat_template_takes_text_but_no_messages(tmp_path: Path) -> None:
    _llama3(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("Hello")
    assert not tokenizer.has_chat_template
    assert not tokenizer.supports_system
    assert not tokenizer.supports_thinking
    with pytest.raises(RequestError, match=r"no chat template.*plain text") as caught:
        tokenizer.encode_chat(CHATS[0])
    assert caught.value.code == "no_chat_template"


def test_lone_surrogate_is_refused(tmp_path: Path) -> None:
    _gpt2(tmp_path)
    with pytest.raises(RequestError, match=r"'\\ud83d', half of a character"):
        Tokenizer.from_folder(tmp_path).encode("a\ud83d")


def test_token_that_only_the_configuration_names_as_special_is_special(tmp_path: Path) -> None:
    pair = Pair("qwen2", tmp_path, eos_token="<think>")
    ids = pair.tokenizer.encode("a<think>b")
    assert ids == pair.reference("a<think>b")["input_ids"]
    assert pair.tokenizer.decode(ids) == pair.reference.decode(ids, skip_special_tokens=True) == "ab"
    assert pair.tokenizer.is_special(ids[1])
    assert pair.tokenizer.eos_token_ids == (ids[1],)
    assert pair.tokenizer.thinking_markers is None, "a marker that is not shown cannot be found in the text"
    assert "<think>" in pair.tokenizer.decode(pair.tokenizer.encode_chat([{"role": "user", "content": "<think>"}])[1])


def test_flags_of_a_special_token_are_kept_and_its_mark_has_them_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _qwen2(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_special_tokens([AddedToken("<|blank|>", lstrip=True, rstrip=True, special=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    template = "{{ messages[0].content }} \n <|blank|> \n {{ messages[0].content }}"
    monkeypatch.setitem(
        FAMILIES, "blank", lambda folder: {**config, "mask_token": "<|blank|>", "chat_template": template}
    )
    pair = Pair("blank", tmp_path)
    assert pair.tokenizer.encode("a  <|blank|> b") == pair.reference("a  <|blank|> b")["input_ids"]
    chat = [{"role": "user", "content": "a"}]
    expected = pair.reference.apply_chat_template(chat)["input_ids"]
    assert pair.tokenizer.encode_chat(chat, not_read="<|blank|>")[1] == expected
    assert len(expected) == 3


def test_special_tokens_that_the_model_does_not_have_are_not_added(tmp_path: Path) -> None:
    config = _gpt2(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "pad_token": "[PAD]"}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert not any(map(tokenizer.is_special, tokenizer.encode("a[PAD]")))
    assert tokenizer.decode(tokenizer.encode("a[PAD]")) == "a[PAD]"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.json"])
def test_broken_file_is_named(tmp_path: Path, name: str) -> None:
    _byte_level([], None).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_text('{"version": "1.0", "mod')
    with pytest.raises(ModelError, match=name.removesuffix(".json").replace("_", ".") + r".*fetch the model again"):
        Tokenizer.from_folder(tmp_path)


def test_folder_without_tokenizer_is_told_apart(tmp_path: Path) -> None:
    assert not has_tokenizer(tmp_path)
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def _slow_folder(folder: Path) -> None:
    config = _qwen2(folder)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(" ".join(merge) for merge in model["merges"]))
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "Qwen2Tokenizer"}))


def test_folder_with_a_slow_tokenizer_is_read_through_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    _slow_folder(tmp_path)
    assert has_tokenizer(tmp_path)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("Hello world, 你好") == reference("Hello world, 你好")["input_ids"]


def test_an_engine_encodes_with_a_slow_tokenizer(tmp_path: Path) -> None:
    """Where there is no tokenizer.json, it said that the model has no tokenizer."""
    pytest.importorskip("transformers")
    _slow_folder(tmp_path)
    shutil.copy(_shape(device_is_gpu=False).folder / "config.json", tmp_path)
    with LLM(str(tmp_path), device="cpu", kernels="cpu", load_format="dummy", num_blocks=4) as llm:
        assert llm.encode("Hello world") == ("Hello world", Tokenizer.from_folder(tmp_path).encode("Hello world"))


def test_slow_tokenizer_without_transformers_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _slow_folder(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match="pip install transformers"):
        Tokenizer.from_folder(tmp_path)

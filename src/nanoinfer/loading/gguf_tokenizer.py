"""Tokenizer files from the vocabulary, merges and chat template inside a GGUF file.

A GGUF file names its splitting rules (`tokenizer.ggml.pre`) instead of storing them; a wrong guess gives plausible but
wrong ids, so only known names are accepted. Token kinds are those of the GGUF specification.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanoinfer.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
# name -> (regular expression for words, or None for GPT-2's own; digits one by one first; NFC; whole words skip merges)
_RULES: dict[str, tuple[str | None, bool, bool, bool]] = {
    "gpt-2": (None, False, False, False),
    "default": (None, False, False, False),
    "smollm": (None, True, False, False),
    "llama-bpe": (_WORDS.replace("DIGITS", "{1,3}"), False, False, True),
    "qwen2": (_WORDS.replace("DIGITS", ""), False, True, False),
}
_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}


def tokenizer_files(metadata: Mapping[str, Any], source: str) -> dict[str, str]:
    """File name -> content of tokenizer.json, tokenizer_config.json and generation_config.json.

    Without a vocabulary in the file there is no tokenizer, only the last one. ModelError if the rules are not known.
    """
    eos = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    generation = {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": sorted({token for token in eos if token is not None}),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    files = {"generation_config.json": json.dumps(generation, indent=2)}
    model = metadata.get("tokenizer.ggml.model", "none")
    if model not in ("none", "no_vocab"):
        if model != "gpt2":
            raise ModelError(f"{source}: tokenizer model '{model}' is not supported; only 'gpt2' (byte-level BPE) is.")
        files["tokenizer.json"] = _build(metadata, source).to_str(pretty=True)
        files["tokenizer_config.json"] = json.dumps(_settings(metadata), indent=2, ensure_ascii=False)
    return files


def _rules_of(metadata: Mapping[str, Any], source: str) -> str:
    given = metadata.get("tokenizer.ggml.pre", "default")
    name = _ALIASES.get(given, given)
    if name not in _RULES:
        known = ", ".join(sorted([*_RULES, *_ALIASES]))
        raise ModelError(f"{source}: tokenizer.ggml.pre '{given}' is not supported; supported are {known}.")
    return str(name)


def _adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether a raw prompt begins with BOS; files without the switch mean yes for Llama 3's rules only."""
    pre = metadata.get("tokenizer.ggml.pre")
    default = _ALIASES.get(str(pre), pre) == "llama-bpe"
    return bool(metadata.get("tokenizer.ggml.add_bos_token", default)) and "tokenizer.ggml.bos_token_id" in metadata


def _build(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    words, single_digits, nfc, skip_merges = _RULES[_rules_of(metadata, source)]
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    vocabulary = {t: i for i, (t, kind) in enumerate(zip(tokens, kinds, strict=False)) if kind != _UNUSED}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=skip_merges))
    except Exception as error:  # the library raises plain Exception for a merge of unknown tokens
        raise ModelError(f"{source}: the tokenizer in the file is damaged ({error}).") from error
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    first: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if single_digits else []
    if words is not None:
        first.append(pre_tokenizers.Split(Regex(words), behavior="isolated"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    if _adds_bos(metadata):
        bos = metadata["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A $B", special_tokens=[(tokens[bos], bos)]
        )
    for token, kind in zip(tokens, kinds, strict=False):
        if kind in (_CONTROL, _UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])
    return tokenizer


def _settings(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": _adds_bos(metadata),
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        settings[f"{name}_token"] = tokens[token] if token is not None and token < len(tokens) else None
    if "tokenizer.chat_template" in metadata:
        settings["chat_template"] = metadata["tokenizer.chat_template"]
    return settings

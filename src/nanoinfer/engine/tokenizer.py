"""Text to token ids and back, read from a model folder's tokenizer.json; chats go through the model's template.

Ids equal those of Hugging Face transformers for the same folder, with one difference on purpose: the text of a special
token inside a chat message is text. A message cannot end its own turn or open another one.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from nanoinfer.engine.chat_template import ChatTemplate, Message, check_messages, find_chat_template
from nanoinfer.engine.detokenizer import IncrementalDetokenizer
from nanoinfer.errors import ModelError, RequestError

if TYPE_CHECKING:
    import tokenizers

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_SLOW_FILES = ("tokenizer.model", "vocab.json", "vocab.txt")
# Around what a model thinks: stop strings do not count there (detokenizer.py), chat shows it apart (cli/thinking.py).
THINKING_MARKERS = ("<think>", "</think>")


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder has a tokenizer of any kind; without one a model takes prompts as token ids only."""
    return any((folder / name).is_file() for name in ("tokenizer.json", *_SLOW_FILES))


class Tokenizer:
    """A model's tokenizer and chat template. `eos_token_ids` are those that the tokenizer names; the model's
    configuration may name more."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        more_special: Sequence[str] = (),
        chat_template: str | None = None,
    ) -> None:
        """special_tokens: texts by name (bos_token, ...), for the template too; more_special: those without a name."""
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        self._named = dict(special_tokens or {})
        known = _special_tokens(backend)
        named = [text for text in (*self._named.values(), *more_special) if text not in known]
        # Marks them as special; a text that is no token of the model never becomes one.
        backend.add_special_tokens([text for text in named if backend.token_to_id(text) is not None])
        self._special = _special_tokens(backend)
        self._special_ids = frozenset(self._special.values())
        self._template_source = chat_template
        eos = self._special.get(self._named.get("eos_token", ""))
        self.eos_token_ids = () if eos is None else (eos,)

    @classmethod
    def from_folder(cls, folder: Path | str) -> Self:
        """Read tokenizer.json, tokenizer_config.json and the chat template of a model folder.

        A folder that only has the files of a slow tokenizer is read through transformers, if that is installed.
        Raises ModelError for a missing or broken file.
        """
        folder = Path(folder)
        backend = _load_backend(folder)
        config = _read_json(folder / "tokenizer_config.json")
        older = _read_json(folder / "special_tokens_map.json")
        named = {name: _token_text(config.get(name, older.get(name))) for name in _NAMED_TOKENS}
        more: list[object] = []
        for key in ("additional_special_tokens", "extra_special_tokens"):
            listed = config.get(key) or ()
            more += listed.values() if isinstance(listed, Mapping) else listed
        try:
            template = find_chat_template(folder, config)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"the chat template of {folder} is broken ({error}); fetch the model again.") from error
        return cls(
            backend,
            special_tokens={name: text for name, text in named.items() if text is not None},
            more_special=[text for text in map(_token_text, more) if text is not None],
            chat_template=template,
        )

    # ---------------------------------------------------------------- encoding

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt: special tokens in it are parsed, and BOS is added if tokenizer.json says so."""
        return self._encode(self._backend, text, add_special_tokens=True)

    def encode_chat(
        self,
        messages: object,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        enable_thinking: bool | None = None,
        **template_options: Any,
    ) -> tuple[str, list[int]]:
        """The prompt's text and ids for chat messages; no special tokens are added to what the template writes.

        enable_thinking None leaves the choice to the template; further options are passed to it as variables. Special
        tokens' text inside messages and options is encoded as ordinary text. Raises RequestError: `no_chat_template`,
        or `invalid_request` for messages that are malformed or that the template refuses.
        """
        template = self._template
        checked = check_messages(messages)
        options = dict(template_options)
        if enable_thinking is not None:
            options["enable_thinking"] = enable_thinking

        def render(messages: list[Message], options: dict[str, Any]) -> str:
            return template.render(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                options=options,
            )

        if self._special and any(map(self._special_pattern.search, _strings([checked, options]))):
            return self._encode_guarded(render, checked, options)
        text = render(checked, options)
        return text, self._encode(self._backend, text, add_special_tokens=False)

    def _encode_guarded(
        self, render: Callable[[list[Message], dict[str, Any]], str], messages: list[Message], options: dict[str, Any]
    ) -> tuple[str, list[int]]:
        """As `encode_chat`, where messages or options contain the text of special tokens.

        Each such text is one private character while the template renders, so what looks like a special token
        afterwards is the template's own. That is replaced by its mark, the characters by what they stand for, and the
        whole is encoded by a tokenizer that knows the marks and takes special tokens for text.
        """
        pattern = self._special_pattern
        taken = set(self._template.source).union(*_strings([messages, options]))
        free = (character for character in map(chr, range(0xF0000, 0xFFFFE)) if character not in taken)
        stand_in = {text: next(free) for text in self._special}
        guarded_messages, guarded_options = _map_strings(
            [messages, options], lambda text: pattern.sub(lambda found: stand_in[found[0]], text)
        )
        rendered = render(guarded_messages, guarded_options)
        restore = str.maketrans({character: text for text, character in stand_in.items()})
        marks, backend, special_id_of = self._guarded_backend
        marked = pattern.sub(lambda found: marks[found[0]], rendered).translate(restore)
        ids = self._encode(backend, marked, add_special_tokens=False)
        return rendered.translate(restore), [special_id_of.get(i, i) for i in ids]

    @cached_property
    def _guarded_backend(self) -> tuple[dict[str, str], tokenizers.Tokenizer, dict[int, int]]:
        """Marks by special token text, a copy of the tokenizer that knows them, and the special id of each mark's id.

        A copy, so that white space and word starts around a mark are treated exactly as around the special token. It
        costs as much as loading the tokenizer, once, for the first chat that needs it.
        """
        import tokenizers

        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.add_special_tokens(list(self._special))
        backend.encode_special_tokens = True
        flags = {t.content: t for t in self._backend.get_added_tokens_decoder().values()}
        nonce = secrets.token_hex(8)  # no message can contain a mark
        marks = {text: f"\U0010fffd{nonce}-{i}\U0010fffd" for text, i in self._special.items()}
        backend.add_tokens(
            [
                tokenizers.AddedToken(
                    mark,
                    lstrip=flags[text].lstrip,
                    rstrip=flags[text].rstrip,
                    normalized=flags[text].normalized,
                )
                for text, mark in marks.items()
            ]
        )
        added = backend.get_added_tokens_decoder()
        special_of_mark = {mark: self._special[text] for text, mark in marks.items()}
        return marks, backend, {i: special_of_mark[t.content] for i, t in added.items() if t.content in special_of_mark}

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self._special, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)))

    def _encode(self, backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start]
            raise RequestError(f"the prompt contains {half!a}, half of a character (a lone surrogate).") from error
        return list(backend.encode(text, add_special_tokens=add_special_tokens).ids)

    # ---------------------------------------------------------------- decoding

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids. Ids that the tokenizer does not know have no text."""
        return str(self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def detokenizer(
        self, prompt_token_ids: Sequence[int], stop: Sequence[str], min_tokens: int
    ) -> IncrementalDetokenizer:
        """The growing text of one sequence of this model."""
        return IncrementalDetokenizer(
            self.decode, prompt_token_ids, stop=stop, min_tokens=min_tokens, thinking=self.thinking_markers
        )

    @cached_property
    def thinking_markers(self) -> tuple[str, str] | None:
        """The two markers around a model's thinking, if each is one visible token of it."""
        ids = [self._backend.token_to_id(marker) for marker in THINKING_MARKERS]
        return None if any(i is None or i in self._special_ids for i in ids) else THINKING_MARKERS

    # ---------------------------------------------------------------- the chat template

    @property
    def has_chat_template(self) -> bool:
        return self._template_source is not None

    @property
    def supports_system(self) -> bool:
        """Whether the chat template takes a system message. False without a template."""
        return self.has_chat_template and self._template.accepts_system

    @property
    def supports_thinking(self) -> bool:
        """Whether the chat template heeds `enable_thinking`."""
        return self.has_chat_template and "enable_thinking" in self._template.names

    @cached_property
    def _template(self) -> ChatTemplate:
        if self._template_source is None:
            raise RequestError(
                "this model has no chat template, so it cannot take messages; send plain text, which is a line like "
                '{"prompt": "..."} of a .jsonl file, or a str in Python.',
                "no_chat_template",
            )
        return ChatTemplate(self._template_source, self._named)


def _special_tokens(backend: tokenizers.Tokenizer) -> dict[str, int]:
    return {token.content: i for i, token in backend.get_added_tokens_decoder().items() if token.special}


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    import tokenizers

    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more specific
            raise ModelError(f"{file} is broken ({error}); fetch the model again.") from error
    if not has_tokenizer(folder):
        raise ModelError(f"{folder} has no tokenizer.json; copy the model's tokenizer files into it.")
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            f"{folder} has no tokenizer.json but an older tokenizer, which only transformers can read: "
            "pip install transformers sentencepiece."
        ) from error
    try:
        slow = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        backend: tokenizers.Tokenizer = slow.backend_tokenizer
    except Exception as error:  # whatever conversion runs into
        raise ModelError(f"transformers cannot read the tokenizer of {folder}: {error}") from error
    return backend


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} is broken ({error}); fetch the model again.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} is broken (not a JSON object); fetch the model again.")
    return content


def _token_text(token: object) -> str | None:
    """A special token's text; files have it as a string or as an object with its flags."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) and text else None


def _strings(value: object) -> Iterator[str]:
    """All strings in nested messages and options, the keys and the checked roles aside."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of nested messages and options with each string changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_map_strings(item, change) for item in value]
    return value

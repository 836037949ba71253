"""Chat messages to the text of a prompt: the messages are checked, then the model's own Jinja template renders them.

The environment is the one that templates are written for (Hugging Face transformers' `apply_chat_template`): a
sandbox, with the same helpers and the same treatment of white space.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from nanoinfer.errors import RequestError

ROLES = ("system", "user", "assistant", "tool")
Message = dict[str, Any]


def check_messages(messages: object) -> list[Message]:
    """Return the messages in the form that templates read: text content, no empty fields.

    Raises RequestError for anything that is not a list of {"role": ..., "content": ...}. A list of text parts becomes
    one text, the parts on lines of their own; parts of any other type are refused by name. An assistant message with
    tool calls needs no content.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise RequestError('messages must be a list of at least one {"role": ..., "content": ...}.')
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _check_message(message: object, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise RequestError(f'{where} is {json_kind(message)}; it must be {{"role": ..., "content": ...}}.')
    checked = {key: value for key, value in message.items() if value is not None}
    role = checked.get("role")
    if role not in ROLES:
        said = "has no role" if role is None else f"has the role {role!r}"
        raise RequestError(f"{where} {said}; use one of {', '.join(ROLES)}.")
    if "content" in checked:
        checked["content"] = _text(checked["content"], where)
    elif not (role == "assistant" and checked.get("tool_calls")):
        raise RequestError(f"{where} has no content.")
    return checked


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(
            f"{where} has {json_kind(content)} as its content; it must be a text or a list of text parts."
        )
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else json_kind(part)
        if kind != "text":
            raise RequestError(f"{where} has a content part of type {kind!r}; only 'text' parts can be read.")
        text = part.get("text")
        if not isinstance(text, str):
            raise RequestError(f"{where} has a text part whose 'text' is {json_kind(text)}.")
        texts.append(text)
    return "\n".join(texts)


def json_kind(value: object) -> str:
    """What a value is, in JSON's words where it has them."""
    if value is None:
        return "null"
    names = {
        str: "a string",
        bool: "true or false",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), f"a {type(value).__name__}")


def find_chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The source of the model's chat template, or None. Of several named templates the one called "default" counts.

    chat_template.jinja goes before tokenizer_config.json's entry, and that before chat_template.json.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    file = folder / "chat_template.json"
    if template is None and file.is_file():
        template = json.loads(file.read_text(encoding="utf-8")).get("chat_template")
    if isinstance(template, list):
        template = {named["name"]: named["template"] for named in template}
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None


class ChatTemplate:
    """A compiled template. `variables` are the special tokens' texts by name (bos_token, eos_token, ...).

    Raises RequestError (code `no_chat_template`) if the source is not valid Jinja.
    """

    def __init__(
        self, source: str, variables: Mapping[str, str], *, now: Callable[[], datetime] = datetime.now
    ) -> None:
        import jinja2

        self.source = source
        self._variables = dict(variables)
        self._environment = _environment(now)
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateError as error:
            raise RequestError(
                f"the model's chat template is broken ({error}); send a plain text prompt instead.", "no_chat_template"
            ) from error

    @cached_property
    def names(self) -> frozenset[str]:
        """The variables that the template reads."""
        from jinja2 import meta

        return frozenset(meta.find_undeclared_variables(self._environment.parse(self.source)))

    @cached_property
    def accepts_system(self) -> bool:
        """Whether a system message is neither refused nor left out."""
        probe = "System instructions for a trial."
        messages: list[Message] = [{"role": "system", "content": probe}, {"role": "user", "content": "Hi."}]
        try:
            return probe in self._render(messages, {})
        except RequestError:
            return False

    def render(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text for messages that `check_messages` has passed.

        add_generation_prompt: end with the header of the assistant's answer. continue_final_message: end inside the
        last message instead, which must be the assistant's, so that the model continues it. options: further
        variables for the template. Raises RequestError with the template's own words where it refuses the messages.
        """
        if any(message["role"] == "system" for message in messages) and not self.accepts_system:
            raise RequestError(
                "this model's chat template takes no system message; put its text into the first user message."
            )
        options = dict(options or {})
        if continue_final_message:
            return self._render_open_ended(messages, options)
        return self._render(messages, {**options, "add_generation_prompt": add_generation_prompt})

    def _render(self, messages: list[Message], options: Mapping[str, Any]) -> str:
        variables: dict[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return str(self._template.render({**variables, **self._variables, **options, "messages": messages}))
        except Exception as error:  # the template is the model's code: it can fail in any way on messages it dislikes
            raise RequestError(f"the model's chat template refuses these messages: {error}") from error

    def _render_open_ended(self, messages: list[Message], options: Mapping[str, Any]) -> str:
        last = messages[-1]
        if last["role"] != "assistant" or "content" not in last:
            raise RequestError("continue_final_message needs a last message with the role assistant and a content.")
        # The mark's trailing space tells whether the template strips the message; no text contains a noncharacter.
        mark = "\U0010fffe "
        marked = [*messages[:-1], {**last, "content": last["content"] + mark}]
        text, found, after = self._render(marked, {**options, "add_generation_prompt": False}).rpartition(mark[0])
        if not found or last["content"].strip() not in text:
            raise RequestError(
                "this model's chat template does not keep the last message as it is: cannot continue it."
            )
        return text if after.startswith(" ") else text.rstrip()


def _environment(now: Callable[[], datetime]) -> Any:
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks the assistant's tokens for training; here its body is rendered and that is all."""

        tags = {"generation"}  # noqa: RUF012  jinja2 reads a class attribute

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter escapes for HTML and sorts keys; models were trained on neither.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment

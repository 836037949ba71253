"""Messages are checked with errors that name the place; templates get the helpers they are written for."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from nanoinfer.engine.chat_template import ChatTemplate, check_messages, find_chat_template
from nanoinfer.errors import RequestError

USER = {"role": "user", "content": "Hi"}


def render(source: str, messages: list[dict[str, Any]] | None = None, /, **options: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, now=lambda: datetime(2024, 7, 9))
    return template.render(messages or [USER], options=options)


# -------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "messages must be a list of at least one"),
        ("Hi", "messages must be a list"),
        ({"role": "user", "content": "Hi"}, "messages must be a list"),
        ([USER, "Hi"], r"messages\[1\] is a string"),
        ([{"content": "Hi"}], r"messages\[0\] has no role; use one of system, user, assistant, tool"),
        ([{"role": "bot", "content": "Hi"}], r"messages\[0\] has the role 'bot'; use one of"),
        ([{"role": ["user"], "content": "Hi"}], r"messages\[0\] has the role \['user'\]"),
        ([{"role": "user"}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": None}], r"messages\[0\] has no content"),
        ([{"role": "assistant", "tool_calls": []}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": 7}], r"messages\[0\] has a number as its content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "content part of type 'image_url'; only 'text'"),
        ([{"role": "user", "content": [{"text": "Hi"}]}], "content part of type None"),
        ([{"role": "user", "content": ["Hi"]}], "content part of type 'a string'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "a text part whose 'text' is null"),
    ],
)
def test_malformed_messages_are_refused_by_place(messages: object, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint) as caught:
        check_messages(messages)
    assert caught.value.code == "invalid_request"


def test_text_parts_are_joined_and_empty_fields_left_out() -> None:
    parts = [{"type": "text", "text": "Summarise:"}, {"type": "text", "text": "some text"}]
    checked = check_messages([{"role": "user", "content": parts, "name": None}])
    assert checked == [{"role": "user", "content": "Summarise:\nsome text"}]


def test_messages_are_copied_not_changed() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}]
    before = json.dumps(messages)
    check_messages(messages)
    assert json.dumps(messages) == before


def test_assistant_with_tool_calls_needs_no_content() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert check_messages([message]) == [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]


# -------------------------------------------------------------------------------------------------- where it stands


def test_template_file_goes_before_the_configuration(tmp_path: Path) -> None:
    assert find_chat_template(tmp_path, {}) is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "third"}))
    assert find_chat_template(tmp_path, {}) == "third"
    assert find_chat_template(tmp_path, {"chat_template": "second"}) == "second"
    (tmp_path / "chat_template.jinja").write_text("first")
    assert find_chat_template(tmp_path, {"chat_template": "second"}) == "first"


def test_of_named_templates_the_default_counts(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    assert find_chat_template(tmp_path, {"chat_template": named}) == "d"
    assert find_chat_template(tmp_path, {"chat_template": named[:1]}) is None


# -------------------------------------------------------------------------------------------------- rendering


def test_blocks_leave_no_white_space() -> None:
    source = "{{ bos_token }}\n  {% for m in messages %}\n{{ m.content }}\n  {% endfor %}\nend{{ eos_token }}"
    assert render(source) == "<s>\nHi\nend</s>"


def test_tojson_keeps_html_characters_unicode_and_order() -> None:
    value = {"z": "<b> & 'čau'", "a": [1, None, True]}
    assert render("{{ value | tojson }}", value=value) == '{"z": "<b> & \'čau\'", "a": [1, null, true]}'
    assert render("{{ value | tojson(indent=1) }}", value={"a": 1}) == '{\n "a": 1\n}'


def test_date_comes_from_the_clock() -> None:
    assert render("{{ strftime_now('%d %b %Y') }}") == "09 Jul 2024"


def test_loop_controls_and_generation_blocks_are_understood() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}."
    assert render(source, [USER, USER]) == "Hi."


def test_tools_and_documents_are_none_not_undefined() -> None:
    assert render("{% if tools is none and documents is none %}none{% endif %}") == "none"


@pytest.mark.parametrize("switch", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
def test_options_reach_the_template_only_where_given(switch: dict[str, bool]) -> None:
    said = render("{{ enable_thinking if enable_thinking is defined else 'not given' }}", **switch)
    assert said == str(switch.get("enable_thinking", "not given"))


def test_mentioned_names_are_those_that_the_template_reads() -> None:  # pitfall 50: warn where the switch does nothing
    template = ChatTemplate("{# enable_thinking #}{{ messages }}{% set custom = 1 %}{{ custom }}{{ other }}", {})
    assert template.names == {"messages", "other"}


def test_generation_prompt_is_there_unless_refused() -> None:
    template = ChatTemplate("{{ messages[-1].content }}{% if add_generation_prompt %}>>{% endif %}", {})
    assert template.render([USER]) == "Hi>>"
    assert template.render([USER], add_generation_prompt=False) == "Hi"


KEEPS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}"
TRIMS = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[/]{% endfor %}"


@pytest.mark.parametrize(
    ("source", "text"), [(KEEPS, "[user]Hi[/][assistant]a b \n"), (TRIMS, "[user]Hi[/][assistant]a b")]
)
def test_continued_message_stays_open(source: str, text: str) -> None:
    messages = [USER, {"role": "assistant", "content": "a b \n"}]
    assert ChatTemplate(source, {}).render(messages, continue_final_message=True) == text


def test_message_that_cannot_be_continued_is_refused() -> None:
    with pytest.raises(RequestError, match="last message with the role assistant"):
        ChatTemplate(KEEPS, {}).render([USER], continue_final_message=True)
    for source in ("nothing", "{{ messages[-1].content[:1] }}", "{{ messages[-1].content[-2:] }}"):
        with pytest.raises(RequestError, match="cannot continue"):
            ChatTemplate(source, {}).render([{"role": "assistant", "content": "abc"}], continue_final_message=True)


# -------------------------------------------------------------------------------------------------- refusals

SYSTEM = [{"role": "system", "content": "Be brief."}, USER]
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{{ messages }}"
IGNORES = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(("source", "accepts"), [(KEEPS, True), (TRIMS, True), (REFUSES, False), (IGNORES, False)])
def test_system_message_is_taken_or_refused_but_never_dropped(source: str, accepts: bool) -> None:
    template = ChatTemplate(source, {})
    assert template.accepts_system is accepts
    if accepts:
        assert "Be brief." in template.render(SYSTEM)
    else:
        with pytest.raises(RequestError, match="no system message; put its text into the first user message"):
            template.render(SYSTEM)
    assert "Hi" in template.render([USER])


def test_the_templates_own_words_are_passed_on() -> None:
    with pytest.raises(RequestError, match="refuses these messages: only one turn, please") as caught:
        render("{{ raise_exception('only one turn, please') }}")
    assert caught.value.code == "invalid_request"


@pytest.mark.parametrize("source", ["{{ messages[7].content }}", "{{ 1 / 0 }}", "{{ messages + 1 }}"])
def test_a_failing_template_is_a_refusal_not_a_crash(source: str) -> None:
    with pytest.raises(RequestError, match="refuses these messages"):
        render(source)


def test_broken_template_is_refused_with_advice() -> None:
    with pytest.raises(RequestError, match=r"template is broken.*plain text") as caught:
        ChatTemplate("{% for %}", {})
    assert caught.value.code == "no_chat_template"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_template_cannot_leave_the_sandbox(source: str) -> None:
    messages = [dict(USER)]
    with pytest.raises(RequestError):
        render(source, messages)
    assert messages == [USER]

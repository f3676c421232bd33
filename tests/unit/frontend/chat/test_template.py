from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tpserve.frontend.chat import template
from tpserve.frontend.chat.template import ChatTemplate, TemplateRefusal
from tpserve.settings import UserError

HI = [{"role": "user", "content": "hi <b>"}]


def render(source: str, messages: list[dict[str, Any]] = HI, **tokens: str) -> str:
    return ChatTemplate(source, tokens).render(messages)


def folder(path: Path, config: dict[str, Any] | None = None, jinja: str | None = None) -> Path:
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    if jinja is not None:
        (path / "chat_template.jinja").write_text(jinja)
    return path


def test_messages_and_the_start_of_the_answer_are_rendered() -> None:
    source = "{% for m in messages %}{{ m['role'] }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    assert render(source) == "user: hi <b>\nA:"


def test_blocks_leave_no_white_space() -> None:
    assert render("  {% if true %}\n  x\n  {% endif %}\ny") == "  x\ny"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hi <b>"}]'),
        ("{{ {'b': 'é', 'a': 1} | tojson(indent=1) }}", '{\n "b": "é",\n "a": 1\n}'),
        ("{{ tools is none }} {{ documents is none }} {{ thinking is defined }}", "True True False"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ bos_token }}|{{ eos_token }}", "<s>|"),
    ],
)
def test_names_that_templates_use_are_there(source: str, text: str) -> None:
    assert render(source, bos_token="<s>") == text


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("{{ raise_exception('no\nsystem role') }}", "no system role"),
        ("{{ messages[7].content }}", "no element 7"),
        ("{{ messages + 1 }}", "TypeError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ range(10 ** 9) | list }}", "Range too big"),
    ],
)
def test_failure_while_rendering_is_one_line_with_its_cause(source: str, cause: str) -> None:
    with pytest.raises(TemplateRefusal, match=cause) as caught:
        render(source)
    assert "\n" not in str(caught.value)


def test_template_that_is_not_jinja_is_a_users_error() -> None:
    with pytest.raises(UserError, match="chat template is not valid Jinja"):
        ChatTemplate("{% for %}", {})


def test_file_of_its_own_goes_before_the_configuration(tmp_path: Path) -> None:
    loaded = template.load(folder(tmp_path, {"chat_template": "config"}, "file"))
    assert loaded is not None
    assert loaded.render(HI) == "file"


def test_special_tokens_may_be_strings_or_objects(tmp_path: Path) -> None:
    config = {
        "chat_template": "{{ bos_token }}{{ eos_token }}",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>"},
        "pad_token": None,
    }
    loaded = template.load(folder(tmp_path, config))
    assert loaded is not None
    assert loaded.render(HI) == "<s></s>"


def test_special_tokens_may_be_in_a_file_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    loaded = template.load(folder(tmp_path, {}, "{{ bos_token }}|{{ eos_token }}"))
    assert loaded is not None
    assert loaded.render(HI) == "<s>|"


def test_special_token_without_its_text_is_a_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"eos_token in tokenizer_config\.json"):
        template.load(folder(tmp_path, {"eos_token": {}}, "x"))


def test_of_several_templates_one_is_for_tools_and_the_default_for_the_rest(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    loaded = template.load(folder(tmp_path, {"chat_template": named}))
    assert loaded is not None
    assert (loaded.render(HI), loaded.render(HI, [{"type": "function"}]), loaded.source) == ("plain", "tools", "tools")


def test_folder_may_have_no_template(tmp_path: Path) -> None:
    assert template.load(tmp_path) is None
    assert template.load(folder(tmp_path, {"bos_token": "<s>"})) is None


@pytest.mark.parametrize("content", ["[]", "{", "null"])
def test_configuration_that_is_no_object_is_a_users_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(UserError, match=rf"^{tmp_path}/tokenizer_config\.json .*; download it again"):
        template.load(tmp_path)


@pytest.mark.parametrize(
    "source", ["{% break %}", "{% if 1 %}" * 150 + "{% endif %}" * 150, "{{" + "(" * 3000 + ")" * 3000 + "}}"]
)
def test_template_of_which_python_makes_nothing_is_refused(source: str) -> None:
    with pytest.raises(UserError, match="the chat template is not valid Jinja: "):
        ChatTemplate(source, {})


def test_template_is_not_computed_before_it_is_used() -> None:
    ChatTemplate("{{ 9 ** 9 ** 9 }}{{ 'a' * 10 ** 11 }}", {})


# Of the shape that models' templates have: they test for tool_calls, and write arguments as JSON.
CALLING = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content + '' }}"
    "{% if 'tool_calls' in m %}{% for call in m.tool_calls %}"
    """{{ '<call>{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}}</call>"""
    "{% endfor %}{% endif %}{% endfor %}{% if thinking is defined and not thinking %}<quiet>{% endif %}"
)


def test_tools_calls_and_their_answers_are_rendered() -> None:
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": {"zone": "CÉT"}}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "12"},
    ]
    assert ChatTemplate(CALLING, {}).render(messages, tools, {"thinking": False}) == (
        '{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}\n'
        '[assistant]<call>{"name": "now", "arguments": {"zone": "CÉT"}}</call>[tool]12<quiet>'
    )


@pytest.mark.parametrize(
    ("source", "role"), [("{{ messages[0].role }}", "system"), ("{{ messages[0].role }}{# developer #}", "developer")]
)
def test_developer_is_system_where_the_template_does_not_know_it(source: str, role: str) -> None:
    assert render(source, [{"role": "developer", "content": "x"}]) == role


def test_names_of_the_tokenizer_go_before_all_others() -> None:
    assert ChatTemplate("{{ bos_token }}", {"bos_token": "<s>"}).render(HI, None, {"bos_token": "x"}) == "<s>"

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tpserve.frontend import template
from tpserve.frontend.template import ChatTemplate, TemplateRefusal
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
        ("{{ tools is none }} {{ documents is none }}", "True True"),
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


def test_default_is_taken_of_several_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    loaded = template.load(folder(tmp_path, {"chat_template": named}))
    assert loaded is not None
    assert loaded.render(HI) == "plain"


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

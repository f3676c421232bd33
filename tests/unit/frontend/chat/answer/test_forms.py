from __future__ import annotations

import pytest

from tpserve.frontend.chat.answer.forms import HERMES, LLAMA3_JSON, CallForm, recognized

# Of the shape that models' templates have, shortened.
QWEN = (
    "{%- if tools %}# Tools\n<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>\n"
    'Answer within <tool_call></tool_call> tags:\n<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>{% endif %}'
)
LLAMA = (
    '{%- if tools is not none %}{{ \'Respond in the format {"name": function name, "parameters": dictionary}. \' }}'
    "{%- for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{% endif %}"
)
CODER = (
    "{% for tool in tools %}{% endfor %}<tool_call>\n<function=NAME>\n<parameter=P>\n</parameter>\n</function>\n</tool_call>"
)
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "form"), [(QWEN, HERMES), (LLAMA, LLAMA3_JSON), (CODER, None), (CHATML, None), ("", None)]
)
def test_form_is_recognized_by_what_the_template_tells_the_model(template: str, form: CallForm | None) -> None:
    assert recognized(template) is form

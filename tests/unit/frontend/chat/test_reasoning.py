from __future__ import annotations

import pytest

from tpserve.frontend.chat import reasoning


@pytest.mark.parametrize(
    ("prompt", "qwen3", "deepseek_r1"),
    [
        ("<|assistant|>", False, True),
        ("<|assistant|><think>\n", True, True),
        ("<|assistant|><think>\n\n</think>\n\n", False, False),
        ("what does <think> mean?<|assistant|>", False, True),
    ],
)
def test_prompt_tells_where_the_answer_begins(prompt: str, qwen3: bool, deepseek_r1: bool) -> None:
    assert (reasoning.opens("qwen3", prompt), reasoning.opens("deepseek_r1", prompt)) == (qwen3, deepseek_r1)

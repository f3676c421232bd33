from __future__ import annotations

import pytest

from tpserve.frontend.chat.answer import reasoning


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
    assert (reasoning.opens("qwen3", prompt, None), reasoning.opens("deepseek_r1", prompt, None)) == (qwen3, deepseek_r1)


@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
@pytest.mark.parametrize(
    ("content", "expected"),
    [("So far", False), ("<think>So far", True), ("<think>hm</think>So far", False), ("</think> <think>", True)],
)
def test_continued_message_is_within_reasoning_only_where_it_has_opened_it(parser: str, content: str, expected: bool) -> None:
    assert reasoning.opens(parser, f"<|assistant|>{content}", content) is expected

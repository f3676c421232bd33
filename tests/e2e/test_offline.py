"""The offline API over one tiny model at TP 2 in float32, in the tests' own process."""

from __future__ import annotations

import asyncio
import io
import os
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.server import Server
from tpserve import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
STORIES = ["Once upon a time", "The quick brown fox", "x"]
CHAT = [{"role": "user", "content": "Hi!"}]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, tensor_parallel_size=2, dtype="float32", kv_cache_memory="64MiB", max_num_seqs=32) as made:
        yield made


def texts(llm: LLM, *args: Any, **keywords: Any) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(*args, **keywords)]


def ids(text: str) -> list[int]:
    """The tiny model's ids of a text without spaces: its tokenizer has one for each character, in their order, from 1."""
    return [ord(char) - ord(" ") for char in text]


def test_texts_are_those_of_the_server_in_the_order_of_the_prompts(llm: LLM, tiny_server: Server) -> None:
    body = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    assert texts(llm, STORIES, GREEDY) == [tiny_server.text(story, **body) for story in STORIES]


def test_output_has_prompt_ids_text_and_reason(llm: LLM) -> None:
    (output,) = llm.generate("abc", GREEDY)
    assert (output.prompt, output.prompt_token_ids, output.finished) == ("abc", ids("abc"), True)
    (answer,) = output.outputs
    assert (answer.index, answer.finish_reason, answer.stop_reason, len(answer.token_ids)) == (0, "length", None, 12)
    assert answer.text


def test_ids_as_prompt_give_what_their_text_gives(llm: LLM) -> None:
    (of_text,) = llm.generate("abc", GREEDY)
    as_array = llm.generate(np.array(ids("abc")), GREEDY)
    by_ids = [llm.generate(ids("abc"), GREEDY), as_array, llm.generate({"prompt_token_ids": ids("abc")}, GREEDY)]
    assert [[output.outputs for output in outputs] for outputs in by_ids] == [[of_text.outputs]] * 3
    assert by_ids[0][0].prompt is None


def test_stop_string_is_the_stop_reason_and_not_in_the_text(llm: LLM) -> None:
    (whole,) = texts(llm, "abc", GREEDY)
    stop = whole[4:6]
    (output,) = llm.generate("abc", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=stop))
    answer = output.outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (whole[: whole.index(stop)], "stop", stop)


def test_end_of_sequence_id_stops_and_is_among_the_ids(llm: LLM) -> None:
    outputs = llm.generate(["abc"] * 16, SamplingParams(temperature=100.0, max_tokens=300))  # any id is as likely
    stopped = [answer for output in outputs for answer in output.outputs if answer.finish_reason == "stop"]
    assert stopped
    assert all(answer.token_ids[-1] == 0 and answer.stop_reason is None for answer in stopped)


def test_each_prompt_has_its_own_parameters_and_answers(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=3, n=2, seed=1, ignore_eos=True), SamplingParams(max_tokens=5, temperature=0)]
    first, second = llm.generate(["abc", "def"], params)
    assert [(answer.index, len(answer.token_ids)) for answer in first.outputs] == [(0, 3), (1, 3)]
    assert first.outputs[0].token_ids != first.outputs[1].token_ids
    assert [len(answer.token_ids) for answer in second.outputs] == [5]
    again, _ = llm.generate(["abc", "def"], params)
    assert again.outputs == first.outputs
    assert len({output.request_id for output in (first, second, again)}) == 3


def test_equal_prompts_without_a_seed_get_different_answers(llm: LLM) -> None:
    assert len(set(texts(llm, ["abc"] * 4, SamplingParams(ignore_eos=True)))) == 4


def test_many_prompts_come_back_in_order(llm: LLM) -> None:
    prompts = [[2 + i % 90, 2 + i // 90] for i in range(300)]
    params = [SamplingParams(max_tokens=1 + i % 7, ignore_eos=True) for i in range(300)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1 + i % 7 for i in range(300)]


def test_no_prompts_give_no_answers(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_chat_renders_the_models_template(llm: LLM) -> None:
    (output,) = llm.chat(CHAT, GREEDY)
    assert output.prompt == "user: Hi!\nassistant:"
    assert [output.outputs[0].text] == texts(llm, output.prompt, GREEDY)
    assert [one.prompt for one in llm.chat([CHAT, CHAT[:1]], GREEDY)] == [output.prompt] * 2


def test_chat_with_another_template(llm: LLM) -> None:
    (output,) = llm.chat(CHAT, GREEDY, chat_template="{{ messages[0]['content'] }}{{ eos_token }}")
    assert output.prompt == "Hi!<|end|>"
    assert output.prompt_token_ids[-1] == 0


def test_chat_may_be_without_the_beginning_of_an_answer(llm: LLM) -> None:
    (output,) = llm.chat(CHAT, GREEDY, add_generation_prompt=False)
    assert output.prompt == "user: Hi!\n"


def test_logprobs_are_of_each_id(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    for made in (llm.generate("abc", params)[0], llm.chat(CHAT, params)[0]):
        (output,) = made.outputs
        assert output.logprobs is not None
        assert made.prompt_logprobs is not None
        assert [of_id[id_].rank for id_, of_id in zip(output.token_ids, output.logprobs)] == [1] * 4  # greedy
        assert output.cumulative_logprob == pytest.approx(
            sum(of_id[id_].logprob for id_, of_id in zip(output.token_ids, output.logprobs))
        )
        assert made.prompt_logprobs[0] is None
        assert all(id_ in (of_id or ()) for id_, of_id in zip(made.prompt_token_ids[1:], made.prompt_logprobs[1:]))


def test_parameters_about_tokens_hold(llm: LLM) -> None:
    (first,) = llm.generate("abc", GREEDY)[0].outputs[0].token_ids[:1]
    banned = SamplingParams(temperature=0, max_tokens=2, logit_bias={first: -100})
    assert first not in llm.generate("abc", banned)[0].outputs[0].token_ids
    stopped = llm.generate("abc", SamplingParams(temperature=0, stop_token_ids=[first]))[0].outputs[0]
    assert (stopped.token_ids, stopped.text, stopped.stop_reason) == ([first], "", first)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("x" * 1024, r"prompts\[1\]: the prompt has .*1024 tokens"),
        ([5, 257], r"prompts\[1\]: token id 257 is not in the model's vocabulary \(0 to 256\)"),
        ([-1], r"prompts\[1\]: token id -1 is not in the model's vocabulary"),
        ([], r"prompts\[1\]: must not be empty"),
        ("", r"prompts\[1\]: must not be empty"),
        (3.5, r"prompts\[1\]: must be a string"),
    ],
)
def test_prompt_that_cannot_be_is_refused_with_its_place_and_nothing_runs(llm: LLM, prompt: Any, message: str) -> None:
    before = int(llm.generate("x", GREEDY)[0].request_id)
    with pytest.raises(ValueError, match=message):
        llm.generate(["abc", prompt], GREEDY)
    assert int(llm.generate("x", GREEDY)[0].request_id) == before + 1


@pytest.mark.parametrize(
    ("messages", "keywords", "message"),
    [
        ([[*CHAT], [{"role": "user"}]], {}, r"messages\[1\]: messages\[0\].content: is missing"),
        ([{**CHAT[0], "colour": "red"}], {}, r"messages\[0\]: messages\[0\].colour: unknown field"),
        (CHAT, {"tools": [{"type": "function"}]}, r"messages\[0\]: tools\[0\].function: Field required"),
        (CHAT, {"chat_template": "{{ raise_exception('no') }}"}, r"messages\[0\]: the model's chat template refused them: no"),
        ([[]], {}, r"messages\[0\]: "),
    ],
)
def test_conversation_that_cannot_be_is_refused_with_its_place(
    llm: LLM, messages: Any, keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        llm.chat(messages, GREEDY, **keywords)


def test_tokenizer_is_refused_with_the_way_to_one(llm: LLM, tiny_model: Path) -> None:
    with pytest.raises(NotImplementedError, match=f"AutoTokenizer.from_pretrained.*{tiny_model}"):
        llm.get_tokenizer()


def test_generate_in_a_running_event_loop_works_as_in_a_notebook(llm: LLM) -> None:
    async def cell() -> list[str]:
        return texts(llm, STORIES, GREEDY)

    assert asyncio.run(cell()) == texts(llm, STORIES, GREEDY)


def test_threads_may_generate_at_once(llm: LLM) -> None:
    alone = [texts(llm, [story] * 3, GREEDY) for story in STORIES]
    with ThreadPoolExecutor(len(STORIES)) as pool:
        assert list(pool.map(lambda story: texts(llm, [story] * 3, GREEDY), STORIES)) == alone


def test_fork_is_refused_and_harms_nothing(llm: LLM) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
        child = os.fork()
    if child == 0:
        try:
            llm.generate("x")
        except RuntimeError as error:
            llm.close()
            os._exit(3 if f"belongs to process {os.getppid()}" in str(error) else 4)
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert texts(llm, "abc", GREEDY)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "use_tqdm", "shows"), [(Terminal(), True, True), (Terminal(), False, False), (io.StringIO(), True, False)]
)
def test_progress_bar_counts_prompts_on_a_terminal(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, use_tqdm: bool, shows: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    llm.generate(STORIES, GREEDY, use_tqdm=use_tqdm)
    assert ("3/3" in stream.getvalue()) == shows


def test_progress_bar_shows_in_a_notebook(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    llm.generate(STORIES, GREEDY)
    assert "3/3" in stream.getvalue()

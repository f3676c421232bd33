from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as HfTokenizer
from tokenizers.processors import TemplateProcessing

from tpserve.frontend.chat import template
from tpserve.frontend.errors import InvalidRequest
from tpserve.frontend.prompts import PromptMaker
from tpserve.frontend.schema import chat_request, completion_request
from tpserve.tokenizer import Tokenizer

VOCAB, LIMIT = 310, 100


@pytest.fixture
def maker(tokenizer: Tokenizer, model_folder: Path) -> PromptMaker:
    return PromptMaker(tokenizer, template.load(model_folder), VOCAB, LIMIT)


def ids(maker: PromptMaker, prompt: Any) -> list[list[int]]:
    return [one.tolist() for one in maker.prompts(completion_request({"prompt": prompt}, None, VOCAB))]


def chat(maker: PromptMaker, *messages: dict[str, str]) -> list[int]:
    request = chat_request({"messages": list(messages)}, None, VOCAB)
    return list(maker.from_text(maker.render(request), "messages", request.add_special_tokens).tolist())


def test_text_and_ids_become_prompts_in_their_order(maker: PromptMaker, tokenizer: Tokenizer) -> None:
    assert ids(maker, ["the fox", "dog"]) == [tokenizer.encode("the fox", False), tokenizer.encode("dog", False)]
    assert ids(maker, [[5, 6], [0, 309]]) == [[5, 6], [0, 309]]


def test_chat_is_rendered_and_its_special_tokens_are_ids(maker: PromptMaker, tokenizer: Tokenizer) -> None:
    expected = tokenizer.encode("<|user|>user: the fox<|end|><|assistant|>", False)
    assert chat(maker, {"role": "user", "content": "the fox"}) == expected
    assert {0, 1, 2} < set(expected)


@pytest.mark.parametrize("id_", [-1, VOCAB, 2**31, 2**63, 10**30])
def test_id_beyond_the_vocabulary_is_refused_with_its_number(maker: PromptMaker, id_: int) -> None:
    with pytest.raises(InvalidRequest, match=f"token id {id_} "):
        ids(maker, [1, id_])


@pytest.mark.parametrize("prompt", ["the <|end|>", [5, 0]])
def test_token_that_the_model_has_not_is_refused_by_name_from_text_too(tokenizer: Tokenizer, prompt: Any) -> None:
    known = PromptMaker(tokenizer, None, 300, LIMIT)
    assert ids(known, prompt)[0][-1] == 0
    with pytest.raises(InvalidRequest, match=r"^prompt: token id 299 \('.+'\) is not in the model's vocabulary \(0 to 298\)$"):
        ids(PromptMaker(tokenizer, None, 299, LIMIT), tokenizer.text_of(299) if isinstance(prompt, str) else [1, 299])


def test_prompt_must_leave_room_for_one_token(maker: PromptMaker) -> None:
    assert len(ids(maker, [5] * 99)[0]) == 99
    with pytest.raises(InvalidRequest, match=r"has 100 tokens; .* 100") as caught:
        ids(maker, [5] * 100)
    assert caught.value.code == "context_length_exceeded"


def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(maker: PromptMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("tokenized"))
    with pytest.raises(InvalidRequest, match="at least"):
        ids(maker, "x" * 10_000)
    with pytest.raises(InvalidRequest, match=r"messages: .*at least"):
        chat(maker, {"role": "user", "content": "x" * 10_000})


def test_messages_that_the_template_refuses_are_the_clients_error(maker: PromptMaker) -> None:
    with pytest.raises(InvalidRequest, match="no role alien here"):
        chat(maker, {"role": "alien", "content": "x"})


def test_chat_without_a_template_is_refused_with_the_remedy(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"no chat template; .*--chat-template FILE"):
        chat(PromptMaker(tokenizer, None, VOCAB, LIMIT), {"role": "user", "content": "x"})


def test_text_of_no_tokens_is_refused(tokenizer: Tokenizer) -> None:
    nothing = template.ChatTemplate("", {})
    with pytest.raises(InvalidRequest, match="no tokens"):
        chat(PromptMaker(tokenizer, nothing, VOCAB, LIMIT), {"role": "user", "content": "x"})


def test_tools_and_kwargs_reach_the_template(tokenizer: Tokenizer) -> None:
    source = "{{ tools[0].function.name }} {{ mood }} {{ add_generation_prompt }}"
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "fox"}}],
        "chat_template_kwargs": {"mood": "lazy"},
    }
    known = PromptMaker(tokenizer, template.ChatTemplate(source, {}), VOCAB, LIMIT)
    assert known.render(chat_request(body, None, VOCAB)) == "fox lazy True"
    assert (
        known.render(chat_request({**body, "add_generation_prompt": False, "tool_choice": "none"}, None, VOCAB))
        == "fox lazy False"
    )


CONTINUED = {"add_generation_prompt": False, "continue_final_message": True}


def test_final_message_is_continued_at_its_end(maker: PromptMaker, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "the dog "}]
    text = maker.render(chat_request({"messages": messages, **CONTINUED}, None, VOCAB))
    assert text == "<|user|>user: the fox<|end|><|user|>assistant: the dog "


def test_final_message_that_is_not_shown_cannot_be_continued(tokenizer: Tokenizer) -> None:
    silent = PromptMaker(tokenizer, template.ChatTemplate("the fox", {}), VOCAB, LIMIT)
    body = {"messages": [{"role": "assistant", "content": "the"}], **CONTINUED}
    with pytest.raises(InvalidRequest, match=r"^continue_final_message: "):
        silent.render(chat_request(body, None, VOCAB))


def test_beginning_of_a_sequence_is_not_doubled_in_chats(tmp_path: Path, model_folder: Path) -> None:
    saved = HfTokenizer.from_file(str(model_folder / "tokenizer.json"))
    saved.post_processor = TemplateProcessing(single="<|user|> $A", special_tokens=[("<|user|>", 1)])
    saved.save(str(tmp_path / "tokenizer.json"))
    known = PromptMaker(Tokenizer(tmp_path), template.load(model_folder), VOCAB, LIMIT)
    assert ids(known, "fox")[0][0] == 1
    made = chat(known, {"role": "user", "content": "fox"})
    assert made[0] == 1
    assert made[1] != 1
    text = known.render(chat_request({"messages": [{"role": "user", "content": "fox"}]}, None, VOCAB))
    assert known.from_text(text, "messages", add_special_tokens=True).tolist() == [1, *made]

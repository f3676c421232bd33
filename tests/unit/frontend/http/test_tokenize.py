"""/tokenize and /detokenize."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.frontend.rig import in_loop, rig
from tpserve.deployment import Deployment
from tpserve.frontend.chat import template
from tpserve.frontend.http import tokenize
from tpserve.frontend.prompts import PromptMaker
from tpserve.tokenizer import Tokenizer


@in_loop
@pytest.mark.parametrize("text", ["the fox", "", " two  spaces", "<|end|>😀é"])
async def test_ids_are_those_of_completions_and_come_back_as_the_text(deployment: Deployment, text: str) -> None:
    async with rig(deployment) as r:
        body = (await r.post("/tokenize", model="small", prompt=text)).json()
        ids = r.tokenizer.encode(text, True)
        assert body == {"count": len(ids), "max_model_len": 100, "tokens": ids, "token_strs": None}
        assert (await r.post("/detokenize", tokens=ids)).json() == {"prompt": text}


@in_loop
async def test_spellings_of_the_vocabulary_come_when_asked_for(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        body = (await r.post("/tokenize", prompt="the fox", return_token_strs=True)).json()
        assert body["token_strs"] == ["the", "Ġfox"]


@in_loop
async def test_names_of_llama_cpp_are_understood(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        for fields in ({"content": "fox"}, {"content": "fox", "prompt": "fox", "add_special": True, "parse_special": True}):
            assert (await r.post("/tokenize", **fields)).json()["tokens"] == r.ids("fox")


@in_loop
async def test_fields_that_nobody_knows_are_named_those_within_a_chat_too(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        messages = [{"role": "user", "content": "hi", "mood": "good"}]
        response = await r.post("/tokenize", messages=messages, colour="red")
        assert response.headers["X-Ignored-Fields"] == "colour, messages[0].mood"


@pytest.mark.parametrize(
    ("fields", "adds"),
    [
        ({"prompt": "fox"}, True),
        ({"prompt": "fox", "add_special": False}, False),
        ({"prompt": "fox", "add_special_tokens": False, "add_special": False}, False),
        ({"content": "fox"}, False),
        ({"content": "fox", "add_special_tokens": True}, True),
        ({"messages": [{"role": "user", "content": "fox"}]}, False),
        ({"messages": [{"role": "user", "content": "fox"}], "add_special": True}, True),
    ],
)
def test_special_tokens_are_added_where_either_name_says_so(
    deployment: Deployment, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], adds: bool
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(tokenizer, "encode", lambda _, add_special_tokens: asked.append(add_special_tokens) or [5])
    prompts = PromptMaker(tokenizer, template.load(Path(deployment.tokenizer_path)), 310, 100)
    assert tokenize.TextMaker(tokenizer, prompts, 310, 100).tokenize(fields)[0]["tokens"] == [5]
    assert asked == [adds]


@in_loop
async def test_chat_has_the_ids_that_it_is_answered_with(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        messages = [{"role": "user", "content": "hi"}]
        counted = (await r.post("/tokenize", messages=messages)).json()["count"]
        answer = await r.answer(r.chat(messages=messages), "ok")
        assert counted == answer.json()["usage"]["prompt_tokens"]


@in_loop
async def test_loading_server_tokenizes(deployment: Deployment) -> None:
    async with rig(deployment, connected=False) as r:
        assert (await r.post("/tokenize", prompt="fox")).status_code == 200


@in_loop
@pytest.mark.parametrize(
    ("path", "fields", "param", "says"),
    [
        ("/tokenize", {}, "prompt", "wants one of prompt"),
        ("/tokenize", {"prompt": 5}, "prompt", "prompt: Input should be a valid string"),
        ("/tokenize", {"prompt": ["a"]}, "prompt", "prompt: Input should be a valid string"),
        ("/tokenize", {"prompt": "a", "content": "b"}, "prompt", "wants one of prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "messages", "wants one of prompt and messages"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools", "tools: only with messages"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": True, "add_special": False}, "add_special_tokens", "differ"),
        ("/tokenize", {"messages": []}, "messages", "at least 1"),
        ("/tokenize", {"messages": [{"role": "alien", "content": "x"}]}, "messages", "no role alien here"),
        ("/tokenize", {"prompt": "a" * (tokenize.MAX_CHARS + 1)}, "prompt", "at most 1048576 characters"),
        ("/tokenize", {"prompt": "a", "with_pieces": True}, "with_pieces", "not supported yet"),
        ("/detokenize", {}, "tokens", "required"),
        ("/detokenize", {"tokens": "a"}, "tokens", "Input should be a valid list"),
        ("/detokenize", {"tokens": [1, "a"]}, "tokens", "tokens[1]: Input should be a valid integer"),
        ("/detokenize", {"tokens": [-1]}, "tokens", "greater than or equal to 0"),
        ("/detokenize", {"tokens": [310]}, "tokens", "token id 310 is not in the model's vocabulary (0 to 309)"),
        ("/detokenize", {"tokens": [10**30]}, "tokens", "is not in the model's vocabulary"),
    ],
)
async def test_body_with_an_error_is_400_with_its_field(
    deployment: Deployment, path: str, fields: dict[str, Any], param: str, says: str
) -> None:
    async with rig(deployment) as r:
        response = await r.post(path, **fields)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
        assert says in response.json()["error"]["message"]


@in_loop
async def test_unknown_model_is_404(deployment: Deployment) -> None:
    async with rig(deployment) as r:
        for path in ("/tokenize", "/detokenize"):
            assert (await r.post(path, model="no/such", prompt="a", tokens=[5])).status_code == 404

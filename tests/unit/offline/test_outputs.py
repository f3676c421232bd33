"""What comes out of a prompt that has been answered."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

from tests.unit.frontend import small
from tests.unit.frontend.rig import scores
from tpserve.deployment import Deployment
from tpserve.frontend.records import new_record
from tpserve.frontend.schema import completion_request
from tpserve.frontend.text.logprobs import split
from tpserve.messages import Finish
from tpserve.offline.job import Job, Question
from tpserve.offline.outputs import Logprob, RequestOutput
from tpserve.offline.params import SamplingParams
from tpserve.tokenizer import Tokenizer

PROMPT = [7, 1, 9]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    return small.deployment(small.write(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def tokenizer(deployment: Deployment) -> Tokenizer:
    return Tokenizer(Path(deployment.tokenizer_path))


def answered(tokenizer: Tokenizer, deployment: Deployment, params: SamplingParams, ids: list[int]) -> RequestOutput:
    """The output of a prompt to which these ids are the answer."""
    request = completion_request({"prompt": PROMPT, **params.body()}, 1, deployment.spec.vocab_size)
    job = Job(Question(request, None, np.array(PROMPT, "<i4")), 0, SimpleQueue())
    record = new_record(job, 0, 1, tokenizer, deployment)
    job.records.append(record)
    submit = record.submit()
    if submit.prompt_logprobs >= 0:
        record.prompt_scores.append(scores(PROMPT[1:], submit.prompt_logprobs))
    for place, id_ in enumerate(ids, 1):
        score = next(split(scores([id_], submit.logprobs)), None)
        record.choices[0].add(id_, Finish.STOP if place == len(ids) else Finish.NONE, 1.0, score)
    return job.output(0, tokenizer)


def test_logprobs_are_of_every_id_of_the_answer(tokenizer: Tokenizer, deployment: Deployment) -> None:
    ids = [*tokenizer.encode("a", False), 0]
    (output,) = answered(tokenizer, deployment, SamplingParams(logprobs=1), ids).outputs
    assert output.token_ids == ids
    assert output.logprobs == [
        {ids[0]: Logprob(pytest.approx(-ids[0] / 1000), None, "a"), 0: Logprob(0.0, 1, "<|end|>")},
        {0: Logprob(0.0, 1, "<|end|>")},
    ]
    assert output.cumulative_logprob == pytest.approx(-ids[0] / 1000)


def test_prompt_logprobs_begin_with_none(tokenizer: Tokenizer, deployment: Deployment) -> None:
    made = answered(tokenizer, deployment, SamplingParams(prompt_logprobs=0), [0])
    assert made.prompt_logprobs is not None
    assert [of_id and {id_: logprob.logprob for id_, logprob in of_id.items()} for of_id in made.prompt_logprobs] == [
        None,
        {1: pytest.approx(-0.001)},
        {9: pytest.approx(-0.009)},
    ]


def test_nothing_of_logprobs_unless_asked(tokenizer: Tokenizer, deployment: Deployment) -> None:
    made = answered(tokenizer, deployment, SamplingParams(), [0])
    assert (made.prompt_logprobs, made.outputs[0].logprobs, made.outputs[0].cumulative_logprob) == (None, None, None)


def test_reason_to_stop_is_the_id_that_was_named(tokenizer: Tokenizer, deployment: Deployment) -> None:
    (output,) = answered(tokenizer, deployment, SamplingParams(stop_token_ids=[6]), [5, 6]).outputs
    assert (output.finish_reason, output.stop_reason, output.token_ids) == ("stop", 6, [5, 6])


def test_answer_of_no_tokens_is_empty(tokenizer: Tokenizer, deployment: Deployment) -> None:
    (output,) = answered(tokenizer, deployment, SamplingParams(max_tokens=0), [5]).outputs
    assert (output.text, output.token_ids, output.finish_reason) == ("", [], "length")

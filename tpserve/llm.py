"""The offline API: a model in a Python program, as `LLM(model).generate(prompts)`."""

from __future__ import annotations

import itertools
import os
import random
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn, TypeVar

import numpy as np

from tpserve import preflight
from tpserve.frontend import neutral, schema
from tpserve.frontend.chat import template
from tpserve.frontend.errors import ApiError, InvalidRequest, Unavailable
from tpserve.frontend.prompts import PromptMaker
from tpserve.offline import inputs
from tpserve.offline.host import EngineDead, Host
from tpserve.offline.inputs import Conversation, Prompt
from tpserve.offline.job import Job, Question
from tpserve.offline.keywords import to_settings
from tpserve.offline.outputs import RequestOutput
from tpserve.offline.params import SamplingParams
from tpserve.offline.progress import progress_bar
from tpserve.tokenizer import Tokenizer

_Asked = TypeVar("_Asked")


class LLM:
    """A model and the processes that compute it, which live as long as this object.

    `model` is a folder, a GGUF file, a Hub id or 'demo'; keywords are the settings of `tpserve launch` with
    underscores, also by the names that vLLM has for them. With a `seed`, prompts whose parameters have none get the
    same seeds in each run of the program; without it, other ones each time. `with`, `close()`, garbage collection or
    the program's end end it.

    Any number of threads may use it at once. Raises TypeError for an unknown keyword, UserError for whatever else is
    the user's mistake, EngineDead if the engine cannot be started.
    """

    def __init__(self, model: str | os.PathLike[str], **keywords: Any):
        settings, notes = to_settings({"model": model, **keywords})
        resolved = preflight.resolve(settings)
        self._deployment = resolved.model_copy(update={"notes": (*notes, *resolved.notes)})
        self._tokenizer = Tokenizer(Path(resolved.tokenizer_path))
        self._seeds = random.Random(settings.seed)
        self._numbers = itertools.count()
        self._host = Host(self._deployment, self._tokenizer)
        self._finalizer = weakref.finalize(self, self._host.close)
        self._host.start()

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers to one prompt or many, in their order, with parameters for all or for each.

        A prompt is a text, token ids (a list, an array or a tensor), or {"prompt": text}, {"prompt_token_ids": ids}.
        All are checked before the first runs. Raises ValueError with the place of a prompt that cannot be, EngineDead
        when the engine dies meanwhile.
        """
        maker = self._prompt_maker()

        def question(prompt: str | list[int], fields: dict[str, Any]) -> Question:
            request = schema.completion_request({"prompt": prompt, **fields}, self._seed(), self._vocab_size)
            (ids,) = maker.prompts(request)
            return self._question(request, prompt if isinstance(prompt, str) else None, ids)

        return self._run("prompts", inputs.prompts(prompts), sampling_params, question, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """As `generate`, of one conversation or many; each is a list of {"role": ..., "content": ...}.

        `chat_template` is Jinja in place of the model's own; the keywords after it are as in an HTTP body. The answer is the
        text as the model wrote it: calls of tools and reasoning are left in it.
        """
        maker = self._prompt_maker(chat_template)
        fields = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
        }

        def question(conversation: Conversation, parameters: dict[str, Any]) -> Question:
            logprobs = {"logprobs": parameters["logprobs"] is not None, "top_logprobs": parameters["logprobs"]}
            body = {**fields, **parameters, **logprobs, "messages": [*conversation]}
            request = schema.chat_request(body, self._seed(), self._vocab_size)
            text = maker.render(request)
            return self._question(request, text, maker.from_text(text, "messages", request.add_special_tokens))

        return self._run("messages", inputs.conversations(messages), sampling_params, question, use_tqdm)

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used where none are given: as the model's generation_config.json has it."""
        return SamplingParams(**self._deployment.sampling.model_dump())

    def get_tokenizer(self) -> NoReturn:
        """Raises NotImplementedError that says how to get one: transformers is not imported here."""
        folder = self._deployment.tokenizer_path
        raise NotImplementedError(
            f"get_tokenizer is not supported yet; transformers.AutoTokenizer.from_pretrained({folder!r}) reads the same files"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError("an LLM cannot be copied or pickled: its processes belong to this one; make another")

    def close(self) -> None:
        """End the engine; nothing of it is left. Calls from now on raise EngineDead."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _vocab_size(self) -> int:
        return self._deployment.spec.vocab_size

    def _seed(self) -> int:
        """Of a prompt whose parameters have none: another one each time, so that equal prompts get different answers."""
        return self._seeds.getrandbits(64)

    def _question(self, request: schema.GenerateRequest, text: str | None, ids: np.ndarray) -> Question:
        """Raises InvalidRequest."""
        if request.ignored:
            raise neutral.refuse(request.ignored[0], ())
        request.check([ids], self._deployment.max_model_len)
        return Question(request, text, ids)

    def _prompt_maker(self, chat_template: str | None = None) -> PromptMaker:
        source = self._deployment.chat_template if chat_template is None else chat_template
        chosen = template.load(Path(self._deployment.tokenizer_path), source)
        return PromptMaker(self._tokenizer, chosen, self._vocab_size, self._deployment.max_model_len)

    def _run(
        self,
        name: str,
        asked: Sequence[_Asked],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        question: Callable[[_Asked, dict[str, Any]], Question],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """The answers to all that is asked; `name` is the argument that it was given as."""
        ended: SimpleQueue[Job] = SimpleQueue()
        jobs = []
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        for place, (one, params) in enumerate(zip(asked, inputs.params(given, len(asked)))):
            try:
                jobs.append(Job(question(one, params.body()), place, ended))
            except InvalidRequest as error:
                raise ValueError(_at(name, place, error)) from None
        with self._host.working_on(jobs), progress_bar(len(jobs), use_tqdm) as bar:
            for _ in jobs:
                _check(ended.get(), name)
                bar.update()
        return [job.output(next(self._numbers), self._tokenizer) for job in jobs]


def _check(job: Job, name: str) -> None:
    """Raise what has ended the job, if that was an error."""
    match job.error:
        case Unavailable():
            raise EngineDead(job.error.message)
        case InvalidRequest():
            raise ValueError(_at(name, job.place, job.error))
        case ApiError():
            raise RuntimeError(_at(name, job.place, job.error))


def _at(name: str, place: int, error: ApiError) -> str:
    """The error's message with the place of what it is about."""
    return f"{name}[{place}]: " + error.message.removeprefix("prompt: ").removeprefix("messages: ")

"""The parameters by which ids are chosen: what each may be, and what a model's makers set them to."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_TEMPERATURE = 100.0
# Far beyond what anybody uses, and far from where a float32 logit would overflow.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0

Temperature = Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)]  # 0: always the likeliest id
TopP = Annotated[float, Field(ge=0, le=1)]  # 1: off
TopK = Annotated[int, Field(ge=-1)]  # 0 and -1: off
MinP = Annotated[float, Field(ge=0, le=1)]  # 0: off
RepetitionPenalty = Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)]  # 1: off
AdditivePenalty = Annotated[float, Field(ge=-2, le=2)]  # presence and frequency penalty; 0: off


class SamplingDefaults(BaseModel):
    """What a request gets that leaves these out: as OpenAI has it, where the model's makers say nothing else."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0

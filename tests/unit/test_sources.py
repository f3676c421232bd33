"""Variables as settings, and refusals that say where a value was given."""

from __future__ import annotations

import pytest

from tpserve import sources
from tpserve.settings import Settings, UserError
from tpserve.sources import Given


def test_variables_of_settings_are_read_and_others_left_alone() -> None:
    given = sources.environment({"TPSERVE_TP": "2", "TPSERVE_CONFIG": "x", "TPSERVE_CACHE": "y", "TP": "3", "TPSERVE_PORT": ""})
    assert given == {"tp": Given("2", "TPSERVE_TP", "TPSERVE_TP=2")}


def test_several_values_of_a_variable_are_words() -> None:
    given = sources.environment({"TPSERVE_SERVED_MODEL_NAME": "a  b"})
    assert sources.check(given) == Settings(served_model_name=("a", "b"))


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"TPSERVE_TPP": "2"}, "no such setting: TPSERVE_TPP; did you mean TPSERVE_TP?"),
        ({"TPSERVE_tp": "2"}, "no such setting: TPSERVE_tp; did you mean TPSERVE_TP?"),
        ({"TPSERVE_TP": "2", "TPSERVE_TENSOR_PARALLEL_SIZE": "2"}, "TPSERVE_TENSOR_PARALLEL_SIZE and TPSERVE_TP are the same"),
    ],
)
def test_variable_that_would_be_ignored_is_refused(variables: dict[str, str], says: str) -> None:
    with pytest.raises(UserError, match=says.replace("?", r"\?")):
        sources.environment(variables)


def test_wrong_value_is_refused_as_it_was_written() -> None:
    with pytest.raises(UserError) as refusal:
        sources.check({"seed": Given("1", "--seed", "--seed 1"), "tp": Given("two", "run.yaml:3", "run.yaml:3: tp: two")})
    assert str(refusal.value) == "run.yaml:3: tp: two: must be a valid integer"

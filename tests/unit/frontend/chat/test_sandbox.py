from __future__ import annotations

import pytest

from tpserve.frontend.chat import sandbox
from tpserve.frontend.chat.sandbox import Environment, TooMuchWork


def render(source: str, **names: object) -> str:
    return sandbox.render(Environment().compiled(source), names)


LOOP = "{% for i in range(99999) %}"


@pytest.mark.parametrize(
    "source",
    [
        f"{LOOP}{LOOP}{{% endfor %}}{{% endfor %}}",
        f"{LOOP}{LOOP}{{{{ i }}}}{{% endfor %}}{{% endfor %}}",
        "{% macro twice(n) %}{% if n %}{{ twice(n - 1) }}{{ twice(n - 1) }}{% endif %}{% endmacro %}{{ twice(60) }}",
    ],
)
def test_endless_work_comes_to_an_end(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.05)
    with pytest.raises(TooMuchWork, match=r"it takes more than 0\.05 s"):
        render(source)


def growing(step: str) -> str:
    return f"{{% set n = namespace(x=start) %}}{{% for i in range(99) %}}{{% set n.x = {step} %}}{{% endfor %}}{{{{ n.x }}}}"


@pytest.mark.parametrize(
    ("source", "start"),
    [
        ("{{ start ** 99999 }}", 9),
        ("{{ start * 10 ** 10 }}", "a"),
        ("{{ 10 ** 10 * start }}", [1]),
        (growing("n.x + n.x"), "a"),
        (growing("n.x ~ n.x"), "a"),
        (growing("n.x * n.x"), 3),
        (f"{LOOP}{{{{ start }}}}{{% endfor %}}", "a" * 1000),
    ],
)
def test_nothing_grows_without_a_bound(source: str, start: object) -> None:
    with pytest.raises(TooMuchWork, match=r"too large|characters"):
        render(source, start=start)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for x in [1, 2] %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}", "1/2False 2/2True "),
        ("{% for x in [1, [2, 3]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "123"),
        ("{% for x in [] %}a{% else %}b{% endfor %}{% for x in unknown %}c{% endfor %}", "b"),
        ("{% for k, v in {'a': 1, 'b': 0}.items() if v %}{{ k ~ v }}{% endfor %}", "a1"),
        ("{{ 'a' + 'b' }}{{ 'a' * 3 }}{{ 2 ** 10 }}{{ [1] + [2] }}{{ 2 * 3 + 0.5 }}", "abaaa1024[1, 2]6.5"),
        ("{% macro f(context) %}{{ context }}{% endmacro %}{{ f(context=3) }}", "3"),
    ],
)
def test_ordinary_work_is_as_in_jinja(source: str, text: str) -> None:
    assert render(source) == text

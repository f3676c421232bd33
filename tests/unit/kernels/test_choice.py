from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.specs import llama_spec
from tpserve.deployment import Native
from tpserve.kernels import choice
from tpserve.kernels.native.library import MAX_HEAD_DIM, NotBuilt
from tpserve.settings import Settings, UserError

SPEC = llama_spec(vocab=32, hidden=32, layers=1, heads=2, kv_heads=1, head_dim=64, intermediate=32)
LARGE = replace(SPEC, head_dim=MAX_HEAD_DIM + 8)
BUILT = SimpleNamespace(name="avx2", sources="0123")


def missing() -> Any:
    raise NotBuilt("the native kernels were not built (how to)")


@pytest.fixture(autouse=True)
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "library", lambda: BUILT)


@pytest.mark.parametrize("kernels", ["auto", "native"])
def test_native_kernels_that_were_built_are_chosen(kernels: Any) -> None:
    assert choice.choose(Settings(kernels=kernels), "cpu", SPEC) == (Native(level="avx2", sources="0123"), None)


def test_native_kernels_are_not_chosen_elsewhere_or_where_torch_is_wanted() -> None:
    assert choice.choose(Settings(kernels="torch"), "cpu", SPEC) == (None, None)
    assert choice.choose(Settings(), "cuda", SPEC) == (None, None)
    native, note = choice.choose(Settings(kernels="native"), "cuda", SPEC)
    assert native is None
    assert note is not None
    assert note.startswith("--kernels native has no effect on a GPU")


def test_native_kernels_that_are_missing_are_done_without_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "library", missing)
    said = "plain torch does the work, which is slower: the native kernels were not built (how to)"
    assert choice.choose(Settings(), "cpu", SPEC) == (None, said)
    with pytest.raises(UserError, match=r"^--kernels native: .* not built \(how to\); or give --kernels torch"):
        choice.choose(Settings(kernels="native"), "cpu", SPEC)


def test_heads_too_large_for_native_attention_are_named() -> None:
    native, note = choice.choose(Settings(), "cpu", LARGE)
    assert native is None
    named = f"up to {MAX_HEAD_DIM} dimensions, not {LARGE.head_dim}"
    assert note is not None
    assert named in note
    with pytest.raises(UserError, match=named):
        choice.choose(Settings(kernels="native"), "cpu", LARGE)


def test_rank_loads_what_was_chosen_and_nothing_else() -> None:
    assert choice.chosen(None) is None
    assert choice.chosen(Native(level="avx2", sources="0123")) is BUILT
    for other in (Native(level="amx", sources="0123"), Native(level="avx2", sources="4567")):
        with pytest.raises(NotBuilt, match=r"were exchanged since the launch: .*avx2.*0123.*, not .*"):
            choice.chosen(other)


def test_rank_whose_library_is_gone_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "library", missing)
    with pytest.raises(NotBuilt, match="were not built"):
        choice.chosen(Native(level="avx2", sources="0123"))

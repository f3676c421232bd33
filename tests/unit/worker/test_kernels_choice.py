from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tpserve.kernels.native.kernels import MAX_HEAD_DIM
from tpserve.kernels.native.library import NotBuilt
from tpserve.worker import process


def charge(kernels: str = "auto", device: str = "cpu", head_dim: int = 64) -> Any:
    deployment = SimpleNamespace(
        settings=SimpleNamespace(kernels=kernels), device=device, spec=SimpleNamespace(head_dim=head_dim)
    )  # fmt: skip
    return SimpleNamespace(deployment=deployment, rank=0)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("tpserve"), "propagate", True)
    return caplog


@pytest.mark.parametrize("given", [charge(kernels="torch"), charge(device="cuda")])
def test_native_kernels_are_not_taken_elsewhere_or_where_torch_is_wanted(given: Any) -> None:
    assert process._native(given) is None


def test_native_kernels_that_are_missing_are_said_once_and_done_without(
    warnings: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise NotBuilt("the native kernels were not built")

    monkeypatch.setattr(process, "library", missing)
    assert process._native(charge()) is None
    assert warnings.messages == ["plain torch does the work, which is slower: the native kernels were not built"]
    with pytest.raises(NotBuilt):
        process._native(charge(kernels="native"))


def test_heads_too_large_for_native_attention_are_named(warnings: pytest.LogCaptureFixture) -> None:
    large = MAX_HEAD_DIM + 8
    assert process._native(charge(head_dim=large)) is None
    assert f"not {large}" in warnings.text
    with pytest.raises(NotBuilt, match=f"up to {MAX_HEAD_DIM} dimensions, not {large}"):
        process._native(charge(kernels="native", head_dim=large))

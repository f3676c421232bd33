"""Who may import whom: what keeps the cores pure, the processes apart, and all but the workers free of torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("tpserve", "launcher")
HEAVY = ("torch", "transformers")

# What of the project a module may import at most; a package stands for all that is in it.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "tpserve.messages": ("tpserve.codec", "tpserve.plans"),
    "tpserve.plans": ("tpserve.codec",),
    "tpserve.settings": (),
    "tpserve.board": (),
    "tpserve.codec": (),
    "tpserve.log": (),
    "tpserve.interpreter": (),
    "tpserve.model.spec": (),
    "tpserve.parallel.segment": (),
    "tpserve.parallel.partition": ("tpserve.model.spec",),
    "tpserve.sampling": (),
    "tpserve.grammar": ("tpserve.tokenizer",),
    "tpserve.frontend.structured": ("tpserve.frontend.errors",),
    "tpserve.deployment": ("tpserve.settings", "tpserve.model.spec", "tpserve.sampling"),
    "launcher": (
        "launcher",
        "tpserve.settings",
        "tpserve.messages",
        "tpserve.codec",
        "tpserve.deployment",
        "tpserve.child",
        "tpserve.interpreter",
        "tpserve.board",
        "tpserve.log",
        "tpserve.memory",
        "tpserve.parallel.segment",
    ),
}
APART = ("tpserve.frontend", "tpserve.coordinator", "tpserve.worker")
# The only places that may import torch or transformers, be it inside a function.
WITH_TORCH = (
    "tpserve.worker",
    "tpserve.kernels",
    "tpserve.model.decoder",
    "tpserve.model.rotary",
    "tpserve.parallel.backends",
    "tpserve.parallel.collectives",
    "tpserve.parallel.distributed",
    "tpserve.parallel.shared_memory",
    "tpserve.parallel.shared_memory_native",
    "tpserve.checkpoint.weights",
    "tpserve.checkpoint.gguf.convert",
    "tpserve.checkpoint.gguf.families",
    "tpserve.checkpoint.gguf.family",
    "tpserve.checkpoint.gguf.weights",
)


def module_name(path: Path) -> str:
    """tpserve/model/spec.py -> tpserve.model.spec; a package has its folder's name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


def is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def imports(source: str, known: set[str]) -> set[str]:
    """Every module imported anywhere in the source: `from tpserve import log` imports tpserve.log, not just tpserve."""
    out = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            out |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            out |= (names & known) or {node.module}
    return out


IMPORTS = {name: imports(path.read_text(), set(MODULES)) for name, path in MODULES.items()}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch.nn as nn", {"torch.nn"}),
        ("from tpserve import log, __version__", {"tpserve.log"}),
        ("from tpserve.log import setup", {"tpserve.log"}),
        ("def f():\n    from torch import Tensor", {"torch"}),
    ],
)
def test_imports_of_a_source_are_found(source: str, expected: set[str]) -> None:
    assert imports(source, {"tpserve", "tpserve.log"}) == expected


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_layer_imports_of_the_project_only_what_it_may(package: str) -> None:
    layer = [module for module in MODULES if is_in(module, (package,))]
    assert layer, f"{package} is gone: its rule should go too"
    extra = {
        (module, found)
        for module in layer
        for found in IMPORTS[module]
        if is_in(found, PACKAGES) and not is_in(found, MAY_IMPORT[package])
    }
    assert not extra


@pytest.mark.parametrize("package", APART)
def test_process_package_does_not_import_the_others(package: str) -> None:
    others = tuple(other for other in APART if other != package)
    assert not [(m, i) for m in MODULES if is_in(m, (package,)) for i in IMPORTS[m] if is_in(i, others)]


@pytest.mark.parametrize("module", WITH_TORCH)
def test_module_that_may_import_torch_is_there(module: str) -> None:
    assert module in MODULES, "it is gone: so should be its right"


def test_torch_is_imported_only_where_tensors_are() -> None:
    assert not [(m, i) for m in MODULES if not is_in(m, WITH_TORCH) for i in IMPORTS[m] if is_in(i, HEAVY)]


def test_modules_outside_the_workers_load_without_torch() -> None:
    light = [name for name in MODULES if not is_in(name, WITH_TORCH) and not name.endswith("__main__")]
    script = (
        "import importlib, sys\n"
        f"for name in {light}:\n"
        "    importlib.import_module(name)\n"
        f"    loaded = set({HEAVY}) & set(sys.modules)\n"
        "    assert not loaded, f'import {name} loads {loaded}'\n"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr

"""Compiles the native kernels into one shared library. Needs a C++17 compiler and nothing of Python's or torch's headers.

The package's own build calls `build`; so does `python -m tpserve.kernels.native.build`, for a checkout.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

FOLDER = Path(__file__).parent
LIBRARY = "libtpserve.so"

# Compiled once for each level that the machine's kind may have, from the least to the most.
_KERNELS = ("rows.cpp", "linear.cpp", "rotary.cpp", "attention.cpp", "sampling.cpp", "level.cpp")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma", "-mf16c")
_X86_LEVELS = {
    "plain": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": _AVX512,
    "amx": (*_AVX512, "-mamx-tile", "-mamx-bf16"),
}
# Once. No kernel is in these, so they run on any machine.
_SHELL = ("cpu.cpp", "collective.cpp", "team.cpp", "program.cpp", "entry.cpp", "sampling_entry.cpp")
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread")
# GCC 12 says of its own headers that they read what is not set, and of wide vectors that calls pass them differently.
_QUIET = ("-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-uninitialized")
# Multiply-adds may be fused; nothing else of IEEE arithmetic is given up.
_ARITHMETIC = ("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")


class BuildError(RuntimeError):
    """There is no compiler, or it failed."""


def source_digest() -> str:
    """Of everything that the library is made of."""
    digest = hashlib.sha256()
    for path in sorted((*FOLDER.glob("*.cpp"), *FOLDER.glob("*.h"), Path(__file__))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def built_of(library: Path) -> str | None:
    """The digest of the sources that a library was built of, if there is one."""
    try:
        sources = ctypes.CDLL(str(library)).tps_sources
    except (OSError, AttributeError):
        return None
    sources.restype = ctypes.c_char_p
    digest: bytes = sources()
    return digest.decode()


def build(target: Path, extra: tuple[str, ...] = ()) -> Path:
    """Make the library as `target`, with `extra` flags of the compiler and linker (sanitizers). Raises BuildError."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "c++", "clang++")), None)
    if compiler is None:
        raise BuildError("no C++ compiler (g++, c++ or clang++; CXX may name one)")
    levels = _X86_LEVELS if platform.machine() == "x86_64" else {"plain": ()}
    with TemporaryDirectory() as folder:
        objects, commands = [], []

        def compile_(source: str, name: str, flags: tuple[str, ...]) -> None:
            objects.append(str(Path(folder, f"{name}.o")))
            commands.append([compiler, *_FLAGS, *flags, *extra, "-c", str(FOLDER / source), "-o", objects[-1]])

        for level, flags in levels.items():
            for source in _KERNELS:
                compile_(source, f"{source}.{level}", (*_ARITHMETIC, *_QUIET, f"-DLEVEL={level}", *flags))
        known = tuple(f"-DHAS_{level.upper()}" for level in levels)
        for source in _SHELL:
            compile_(source, source, (*known, f'-DSOURCES="{source_digest()}"'))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        part = target.with_suffix(f".{os.getpid()}.part")
        _run([compiler, "-shared", "-pthread", *extra, *objects, "-o", str(part)])
        part.replace(target)
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr.strip()[-4000:]}")
    if done.stderr:
        print(done.stderr, file=sys.stderr)


def main() -> int:
    """Build for this checkout, unless what is there was made of the same sources."""
    if built_of(FOLDER / LIBRARY) == source_digest():
        return 0
    try:
        build(FOLDER / LIBRARY)
    except BuildError as error:
        print(f"the native kernels are not built, so tpserve will be slower on a CPU: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

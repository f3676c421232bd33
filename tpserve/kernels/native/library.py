"""The shared library, loaded once, with the level of the instruction set that this machine has."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_bool, c_char_p, c_double, c_int, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

from tpserve.kernels.native.abi import STRUCTS, Group, Step
from tpserve.kernels.native.build import FOLDER, LIBRARY, built_of, source_digest

MAX_HEAD_DIM = 512  # of `attention.h`

_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "tps_sizes": (None, [POINTER(c_int64)]),
    "tps_level": (c_void_p, [c_char_p]),
    "tps_level_name": (c_char_p, [c_void_p]),
    "tps_pack": (None, [c_void_p, c_void_p, c_void_p, c_int, c_int, c_int, c_int]),
    "tps_team_new": (c_void_p, [c_int, POINTER(c_int32)]),
    "tps_team_delete": (None, [c_void_p]),
    "tps_program_new": (c_void_p, [c_void_p, c_void_p, POINTER(Group)]),
    "tps_program_delete": (None, [c_void_p]),
    "tps_program_add": (None, [c_void_p, c_int, c_void_p]),
    "tps_program_run": (c_bool, [c_void_p, POINTER(Step), POINTER(c_double)]),
    "tps_gather": (c_bool, [POINTER(Group), c_void_p, c_int64, c_void_p]),
    "tps_reduce": (c_bool, [POINTER(Group), c_void_p, c_int64]),
}


class NotBuilt(RuntimeError):
    """There is no library, it was built of other sources, or it has no kernels for what is wanted."""


class Library:
    """`call` has the library's functions; `level` is a pointer to the table of kernels, `name` that level's name.

    `sources` is the digest of what it was built of.
    """

    def __init__(self, level: str | None = None):
        """Use the given level, or the best that this machine has. Raises NotBuilt."""
        digest = built_of(FOLDER / LIBRARY)
        if digest is None or digest != source_digest():
            state = "were not built" if digest is None else "were built of other sources"
            raise NotBuilt(f"the native kernels in {FOLDER} {state}; run python -m tpserve.kernels.native.build")
        self.sources = digest
        self.call = ctypes.CDLL(str(FOLDER / LIBRARY))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(self.call, name)
            function.restype, function.argtypes = result, arguments
        sizes = (c_int64 * len(STRUCTS))()
        self.call.tps_sizes(sizes)
        assert list(sizes) == [ctypes.sizeof(struct) for struct in STRUCTS], "abi.py and the structs of the headers differ"
        self.level = self.call.tps_level(None if level is None else level.encode())
        if self.level is None:
            raise NotBuilt(f"this machine has no {level}")
        self.name: str = self.call.tps_level_name(self.level).decode()


@cache
def library(level: str | None = None) -> Library:
    """The library with a level's kernels. Raises NotBuilt."""
    return Library(level)


class Team:
    """Threads that run programs: the caller, which is pinned already, and a helper on each further core."""

    def __init__(self, lib: Library, cores: list[int]):
        self.lib = lib
        self.size = len(cores)
        self.pointer = lib.call.tps_team_new(len(cores), (c_int32 * len(cores))(*cores))

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            self.lib.call.tps_team_delete(self.pointer)


class Program:
    """Kernels in order, each with its struct of arguments, which is kept as long as the program."""

    def __init__(self, lib: Library, team: Team, group: Group | None):
        self.lib = lib
        self.team = team
        self.group = group
        self._kept: list[Any] = []
        self.pointer = lib.call.tps_program_new(lib.level, team.pointer, None if group is None else byref(group))

    def add(self, op: int, args: ctypes.Structure, *kept: Any) -> None:
        """Append a kernel; `kept` is what `args` points to."""
        self._kept += (args, *kept)
        self.lib.call.tps_program_add(self.pointer, op, ctypes.addressof(args))

    def keep(self, *kept: Any) -> None:
        """Keep what the arguments point to as long as the program."""
        self._kept += kept

    def run(self, step: Step, seconds: ctypes.Array[c_double]) -> bool:
        """Run all, and add the time of each of KINDS to `seconds`; False if some rank did not arrive in time."""
        return bool(self.lib.call.tps_program_run(self.pointer, byref(step), seconds))

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            self.lib.call.tps_program_delete(self.pointer)

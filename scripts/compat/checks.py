"""How the clients' scripts tell what came of their checks."""

from __future__ import annotations

import traceback
from collections.abc import Callable


def run(checks: list[Callable[[], str | None]]) -> int:
    """Make each check; what it returns is a note. Returns the exit status."""
    failed = False
    for check in checks:
        name = check.__name__.replace("_", " ")
        try:
            note = check()
        except Exception as error:
            failed = True
            place = traceback.extract_tb(error.__traceback__)[-1]
            print(f"FAIL {name}: {' '.join(f'{type(error).__name__}: {error}'.split())} (line {place.lineno})", flush=True)
        else:
            print(f"ok {name}{': ' if note else ''}{note or ''}", flush=True)
    return int(failed)

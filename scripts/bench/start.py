#!/usr/bin/env python
"""Seconds from the command to the ready line, median of several starts.

python scripts/bench/start.py [--starts 3] [LAUNCH FLAGS, such as --model demo --tp 2]
"""

from __future__ import annotations

import argparse
import statistics

from load import Launched


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--starts", type=int, default=3)
    args, flags = parser.parse_known_args()
    seconds = []
    for _ in range(args.starts):
        with Launched(*(flags or ["--model", "demo", "--tp", "2"])) as server:
            seconds.append(server.start_s)
            print(f"{server.start_s:.2f} s", flush=True)
    print(f"median {statistics.median(seconds):.2f} s")


if __name__ == "__main__":
    main()

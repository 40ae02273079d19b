"""A supervisor over cheap children, for tests: `python -m ... HOME NAME=CODE ...`; each child runs its code."""

import sys
from pathlib import Path

from evergreen.child import ChildSpec
from evergreen.supervisor import Supervisor


def main() -> None:
    home, ready_url, *children = sys.argv[1:]
    specs = []
    for position, child in enumerate(children):
        name, code = child.split("=", 1)
        specs.append(ChildSpec(name, [sys.executable, "-c", code], stop_phase=position, stop_within_s=1.0))
    Supervisor(
        Path(home), specs, ready_url=ready_url, on_ready=lambda: print("READY", flush=True),
        say=lambda line: print(line, flush=True),
    ).run()  # fmt: skip


if __name__ == "__main__":
    main()

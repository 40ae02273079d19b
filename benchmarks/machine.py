"""Where a benchmark ran and with what: figures of other machines or versions are not comparable."""

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

MATRIX_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""What of a CPU decides how fast it multiplies, in bfloat16 above all."""
PACKAGES = ("torch", "transformers", "peft", "trl")


def machine() -> dict[str, object]:
    """Of Linux: /proc/cpuinfo and /proc/meminfo."""
    about = Path("/proc/cpuinfo").read_text()
    flags = _first(r"^flags\s*:(.*)$", about).split()
    kib = int(_first(r"^MemTotal:\s*(\d+) kB$", Path("/proc/meminfo").read_text()))
    return {
        "cpu": _first(r"^model name\s*:(.*)$", about),
        "cores": len(os.sched_getaffinity(0)),
        "flags": [flag for flag in MATRIX_FLAGS if flag in flags],
        "memory_gib": round(kib / 2**20),
    }


def versions() -> dict[str, str | None]:
    """None: not installed."""
    return {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found[1].strip() if found else ""

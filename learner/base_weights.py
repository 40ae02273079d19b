"""What a base model's weights are, whatever its directory is called: their SHA-256, for an update's provenance."""

from functools import cache
from pathlib import Path

from learner.artifacts import sha256_of_files


def base_sha256(directory: Path) -> str:
    """Hex SHA-256 over the *.safetensors files in `directory`, names and contents.

    Read once per process while size and time of modification stay what they are: a learner of several policies loads
    a base model again at every turn.
    """
    stats = ((path, path.stat()) for path in sorted(directory.glob("*.safetensors")))
    return _read(directory, tuple((path, stat.st_size, stat.st_mtime_ns) for path, stat in stats))


@cache
def _read(directory: Path, files: tuple[tuple[Path, int, int], ...]) -> str:
    return sha256_of_files(directory, (path for path, *_ in files))

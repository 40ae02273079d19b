"""What the client knows, as it happens: one JSON object per line, written out before anything else is done with it.

The journal is the client's own evidence. Whatever it says was acknowledged must be in the server's database, even if
the server was killed in between.
"""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


class Journal:
    """Append-only. Lines are `{"at": UTC time, "event": ..., ...}`; an existing file is never continued.

    ASCII alone: an answer may hold characters that many readers take for line ends (U+0085, U+2028).
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("x", encoding="utf-8")

    def write(self, event: str, **fields: Any) -> None:
        line = {"at": datetime.now(UTC).isoformat(), "event": event, **fields}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

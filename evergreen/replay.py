"""`evergreen replay`: are the weights that are served what the logged rollouts make of version 0?"""

import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
import typer

from app.db.session import Database
from app.policies.learning import FORM
from app.rollouts.recorded import NotRecorded, RecordedUpdate
from app.settings import Settings
from learner.base_weights import base_sha256
from learner.checkpoint import CheckpointMismatch
from learner.replay import Replayed
from learner.replay import replay as run


def replay(settings: Settings, policy: str, to: int, start: int | None, say: Callable[[str], None]) -> bool:
    """Says of each update how its version compares; returns whether version `to` is bit-equal.

    Raises:
        typer.Exit: it cannot be replayed, and said why.
    """
    database = Database(settings.database_url, sqlite_synchronous=settings.sqlite_synchronous)
    last: Replayed | None = None
    warned: list[str] = []
    try:
        for last in run(database, settings, policy, to, start):
            if (differs := _differs(last.update)) != warned:
                warned = differs
                say(f"not as then, so that hashes may differ: {'; '.join(differs) or 'nothing any more'}")
            say(_line(last))
    except (NotRecorded, CheckpointMismatch) as error:
        say(f"cannot be replayed: {error}")
        raise typer.Exit(2) from error
    finally:
        database.close()
    if last is None:
        say(f"version {to} is where a replay begins: there is nothing to rebuild")
        return True
    return last.equal


def _line(replayed: Replayed) -> str:
    claim, original = replayed.update.claim, replayed.update.made
    of = f"update {claim.update_id}, {len(claim.rollouts)} rollouts"
    if replayed.made is None or original is None:
        return f"{of}: the critic alone"
    if replayed.equal:
        return f"{of}: version {original.number} is equal, SHA-256 {original.sha256}"
    largest = replayed.largest_difference
    by = "its files are gone" if largest is None else f"weights differ by {largest:.1e} at most"
    return f"{of}: version {original.number} DIFFERS, SHA-256 {replayed.made.sha256}, not {original.sha256} ({by})"


def _differs(update: RecordedUpdate) -> list[str]:
    """What must be the same for equal hashes, and is not."""
    provenance = update.provenance
    libraries = provenance.get("libraries")
    then = dict(libraries) if isinstance(libraries, dict) else {}
    then["cpu_capability"] = provenance.get("cpu_capability", "")
    then["device"] = provenance.get("device", "")
    now = {name: version(name) for name in then if name not in ("python", "cpu_capability", "device")}
    then["form of learning"] = str(provenance.get("form", 1))  # before there was a second one it was not recorded
    now |= {
        "form of learning": str(FORM),
        "python": platform.python_version(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": "cuda" if torch.cuda.is_available() else "cpu",
    }
    if base := provenance.get("base_sha256"):  # earlier releases did not record it
        then["base model"], now["base model"] = base, base_sha256(Path(update.claim.base_model))
    return [f"{name} {then[name]} then, {now[name]} now" for name in sorted(then) if then[name] != now[name]]

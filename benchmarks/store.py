"""How fast the store takes interactions: threads that begin and complete them through the writer's group commit.

python -m benchmarks.store [--url sqlite:///PATH | postgresql://...] [--threads 64] [--seconds 10]

The database must be empty; without --url a temporary SQLite file is used. Prints one line of JSON.
"""

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID

import numpy as np
from uuid_utils.compat import uuid7

from app.db.repositories.keys import create_key
from app.db.repositories.policies import create_policy
from app.db.repositories.versions import add_version_zero
from app.db.session import Database
from app.db.writer import Writer
from app.feedback.rules import NewFeedback, apply_feedback
from app.policies.learning import LearningSettings
from app.rollouts.lifecycle import Completed, NewInteraction, begin_interaction, complete_interaction

PROMPT = np.arange(200, dtype=np.int32)
COMPLETION = np.arange(20, dtype=np.int32)
LOGPROBS = np.full(20, -0.5, np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url")
    parser.add_argument("--threads", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--synchronous", choices=("NORMAL", "FULL"), default="NORMAL")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = arguments.url or f"sqlite:///{folder}/store.db"
        database = Database(url, sqlite_synchronous=arguments.synchronous)
        figures = measure(database, arguments.threads, arguments.seconds)
        database.close()
    print(json.dumps({"database": url.split(":")[0], "threads": arguments.threads, **figures}))


def measure(database: Database, threads: int, seconds: float) -> dict[str, float]:
    """Rollouts of one call and one reward each: three acknowledged writes."""
    database.upgrade()
    with database.write() as session:
        policy = create_policy(session, name="bench", base_model="/m", settings=LearningSettings())
        add_version_zero(session, policy.id, path="/v0", sha256="0" * 64, adapter_name="bench-v0")
        key, _ = create_key(session, name="bench", scopes=["inference", "feedback"])
    writer = Writer(database)
    writer.start()
    deadline = time.perf_counter() + seconds

    def play() -> list[float]:
        waits = []
        while time.perf_counter() < deadline:
            new = _new(policy.id, key.id)
            reward = NewFeedback(rollout_id=None, interaction_id=str(new.id), value=1.0, body_sha256="0" * 64)
            done = Completed(COMPLETION, LOGPROBS, "stop", None, 0, None, None)
            for work in (
                lambda session, new=new: begin_interaction(session, new),
                lambda session, new=new, done=done: complete_interaction(session, new.id, done),
                lambda session, reward=reward: apply_feedback(session, key, reward),
            ):
                began = time.perf_counter()
                writer.submit(work, order=new.id).result()
                waits.append(time.perf_counter() - began)
        return waits

    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        waits = [wait for job in [pool.submit(play) for _ in range(threads)] for wait in job.result()]
    elapsed = time.perf_counter() - began
    writer.stop()
    return {
        "writes_per_s": round(len(waits) / elapsed, 1),
        "median_ms": round(1e3 * statistics.median(waits), 1),
        "p99_ms": round(1e3 * statistics.quantiles(waits, n=100)[98], 1),
    }


def _new(policy_id: UUID, key_id: UUID) -> NewInteraction:
    return NewInteraction(
        id=uuid7(),
        policy_id=policy_id,
        key_id=key_id,
        client_rollout_id=None,
        version=0,
        prompt_ids=PROMPT,
        temperature=1.0,
        sampling={"temperature": 1.0},
        untrainable=None,
        detail=None,
        request=b"{}" * 400,
        replica="http://127.0.0.1:8101",
        tags={},
    )


if __name__ == "__main__":
    main()

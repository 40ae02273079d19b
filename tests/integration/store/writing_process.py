"""A process that stores interactions until it is killed, and says which it was told are stored.

python -m tests.integration.store.writing_process URL POLICY_ID KEY_ID SECONDS
"""

import itertools
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID

import numpy as np
from sqlalchemy import func, select
from uuid_utils.compat import uuid7

from app.db.models import Interaction
from app.db.session import Database
from app.db.writer import Writer
from app.rollouts.lifecycle import NewInteraction, begin_interaction, complete_interaction
from tests.integration.store.world import completed

THREADS = 4


def main() -> None:
    url, policy_id, key_id, seconds = sys.argv[1:]
    database = Database(url)
    writer = Writer(database)
    writer.start()
    deadline = time.monotonic() + float(seconds)

    def call(name: str) -> None:
        new = NewInteraction(
            id=uuid7(),
            policy_id=UUID(policy_id),
            key_id=UUID(key_id),
            client_rollout_id=name,
            version=0,
            prompt_ids=np.arange(64, dtype=np.int32),
            temperature=1.0,
            sampling={},
            untrainable=None,
            detail=None,
            request=None,
            replica=None,
            tags={},
        )
        begun = writer.submit(lambda session: begin_interaction(session, new), order=new.id).result()
        say("began", new.id)
        writer.submit(
            lambda session: complete_interaction(session, new.id, completed()), order=begun.rollout_id
        ).result()
        say("completed", new.id)

    def calls() -> None:
        for number in itertools.count():
            if time.monotonic() >= deadline:
                break
            # threads and processes meet in the same rollouts
            call(f"shared-{number // 4}")

    def reads() -> None:
        while time.monotonic() < deadline:
            with database.read() as session:
                session.scalar(select(func.count()).select_from(Interaction))

    with ThreadPoolExecutor(THREADS + 1) as pool:
        jobs = [pool.submit(calls) for _ in range(THREADS)] + [pool.submit(reads)]
        for job in jobs:
            job.result()
    writer.stop()
    database.close()
    say("done")


def say(*words: object) -> None:
    # one system call a line, so that threads do not mix their lines
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


if __name__ == "__main__":
    main()

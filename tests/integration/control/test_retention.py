"""What retention deletes and what it must leave, on both databases with real files."""

import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID, uuid4

import numpy as np
import pytest
from sqlalchemy import select, update
from uuid_utils.compat import uuid7

from app.db.models import ApiKey, Deployment, Event, Interaction, Policy, PolicyVersion, Replica, Rollout, Update
from app.db.session import Database
from app.policies.learning import LearningSettings
from app.policies.retention import ORPHAN_AGE_S, Retention
from app.rollouts.states import DeploymentState, InteractionState, UpdateState, VersionStatus


class Files:
    """A policy `default` with version directories and checkpoints under artifacts/."""

    def __init__(self, database: Database, artifacts: Path):
        self.database = database
        self.artifacts = artifacts
        with database.write() as session:
            settings = LearningSettings().model_dump(mode="json")
            policy = Policy(name="default", base_model="/base", settings=settings)
            session.add(policy)
            session.flush()
            self.policy_id = policy.id

    def directory(self, kind: str, name: str, *, age_s: float = 0.0) -> Path:
        path = self.artifacts / "default" / kind / name
        path.mkdir(parents=True)
        (path / "file").write_text("weights")
        then = time.time() - age_s
        os.utime(path, (then, then))
        return path

    def versions(self, count: int) -> list[Path]:
        paths = [self.directory("versions", f"default-v{number}-{uuid4()}") for number in range(count)]
        with self.database.write() as session:
            for number, path in enumerate(paths):
                session.add(PolicyVersion(policy_id=self.policy_id, number=number, adapter_name=path.name,
                                          path=str(path), sha256="0" * 64))  # fmt: skip
            session.execute(update(Policy).values(head=count - 1, live=count - 1))
        return paths

    def change(self, number: int, **values: object) -> None:
        with self.database.write() as session:
            session.execute(update(PolicyVersion).where(PolicyVersion.number == number).values(**values))

    def interaction(self, version: int, state: InteractionState, *, id: UUID | None = None) -> UUID:
        with self.database.write() as session:
            key = ApiKey(name="k", hash=uuid4().hex * 2, prefix="eg", scopes=["inference"])
            session.add(key)
            session.flush()
            rollout = Rollout(policy_id=self.policy_id, key_id=key.id)
            session.add(rollout)
            session.flush()
            interaction = Interaction(
                id=id or uuid7(), policy_id=self.policy_id, rollout_id=rollout.id, version=version, state=state,
                new_prompt_ids=np.array([1, 2], np.int32), prompt_tokens=2, temperature=1.0, sampling={},
                completion_ids=np.array([3], np.int32), request=b"request", response=b"response",
            )  # fmt: skip
            session.add(interaction)
            session.flush()
            return interaction.id

    def update(self, state: UpdateState, started_at: datetime, age_s: float = ORPHAN_AGE_S + 60) -> Path:
        with self.database.write() as session:
            row = Update(policy_id=self.policy_id, state=state, owner="o", base_version=0, settings={},
                         lease_until=started_at, started_at=started_at)  # fmt: skip
            session.add(row)
            session.flush()
            return self.directory("checkpoints", str(row.id), age_s=age_s)

    def tick(self, bodies_kept_days: float = 30.0) -> None:
        Retention(self.database, self.artifacts, bodies_kept_days).tick()


@pytest.fixture
def files(database: Database, tmp_path: Path) -> Files:
    return Files(database, tmp_path / "artifacts")


def test_versions_beyond_the_last_twenty_go_unless_somebody_needs_them(files: Files) -> None:
    paths = files.versions(30)
    files.change(1, pinned=True)
    files.interaction(2, InteractionState.RUNNING)
    files.interaction(3, InteractionState.COMPLETED)
    with files.database.write() as session:
        replica = Replica(url="http://engine")
        session.add(replica)
        session.flush()
        four, five = (
            session.scalars(select(PolicyVersion.id).where(PolicyVersion.number == number)).one() for number in (4, 5)
        )
        session.add(Deployment(replica_id=replica.id, version_id=four, state=DeploymentState.VERIFIED))
        session.add(Deployment(replica_id=replica.id, version_id=five, state=DeploymentState.UNLOADED))
    files.tick()
    assert [n for n, path in enumerate(paths) if path.exists()] == [0, 1, 2, 4, *range(10, 30)]
    with files.database.read() as session:
        gone = session.scalars(select(PolicyVersion.number).where(PolicyVersion.files_deleted_at.is_not(None)))
        assert sorted(gone) == [3, 5, 6, 7, 8, 9]


def test_what_engines_load_again_after_a_restart_keeps_its_files(files: Files) -> None:
    """Every fourth version was live, the others were superseded; the engine's rows are gone, as after its restart."""
    paths = files.versions(45)
    live = range(12, 44, 4)
    for number in range(1, 45):
        files.change(number, status=VersionStatus.RETIRED if number in live else VersionStatus.SUPERSEDED)
    files.tick()
    assert all(paths[number].exists() for number in live)  # eight of them
    assert [number for number in range(25) if paths[number].exists()] == [0, 12, 16, 20, 24]


def test_of_whole_models_the_last_three_are_kept(files: Files) -> None:
    paths = files.versions(8)
    files.change(1, pinned=True)
    with files.database.write() as session:
        session.execute(update(Policy).values(training="full", live=2))
    files.tick()
    assert [n for n, path in enumerate(paths) if path.exists()] == [0, 1, 2, 5, 6, 7]


def test_nothing_live_yet_deletes_nothing(files: Files) -> None:
    paths = files.versions(2)
    with files.database.write() as session:
        session.execute(update(Policy).values(live=None))
    files.tick()
    assert all(path.exists() for path in paths)


def test_an_old_live_version_keeps_its_files(files: Files) -> None:
    paths = files.versions(30)
    with files.database.write() as session:
        session.execute(update(Policy).values(live=7))
    files.tick()
    assert [n for n, path in enumerate(paths) if path.exists()] == [0, 7, *range(10, 30)]


def test_old_checkpoints_go_but_the_last_three_and_the_running_one(files: Files) -> None:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    done = [files.update(UpdateState.DONE, start + timedelta(minutes=n)) for n in range(5)]
    failed = files.update(UpdateState.FAILED, start + timedelta(minutes=9))
    running = files.update(UpdateState.RUNNING, start + timedelta(minutes=10))
    young = files.update(UpdateState.FAILED, start, age_s=0)
    with files.database.write() as session:
        session.execute(update(Policy).values(checkpoint_update_id=UUID(done[0].name)))
    files.tick()
    assert [path.exists() for path in done] == [True, False, True, True, True]
    assert not failed.exists()
    assert running.exists()
    assert young.exists(), "its learner may be at it"


def test_orphans_go_once_they_are_old(files: Files) -> None:
    files.versions(1)
    old, young = ORPHAN_AGE_S + 60, ORPHAN_AGE_S - 60
    gone = [
        files.directory("versions", f"default-v9-{uuid4()}", age_s=old),
        files.directory("versions", ".tmp-default-v9", age_s=old),
        files.directory("checkpoints", ".tmp-checkpoint", age_s=old),
    ]
    kept = [
        files.directory("versions", f"default-v9-{uuid4()}", age_s=young),
        files.directory("checkpoints", ".tmp-young", age_s=young),
    ]
    files.tick()
    assert [path.exists() for path in gone] == [False] * 3
    assert [path.exists() for path in kept] == [True] * 2


def test_a_home_that_was_moved_keeps_its_files(files: Files) -> None:
    """The rows say where the files once were, and the old place may hold somebody's copy."""
    paths = files.versions(30)
    elsewhere = files.artifacts.rename(files.artifacts.with_name("elsewhere"))
    files.artifacts.mkdir()
    (copy := paths[3]).mkdir(parents=True)
    for path in (elsewhere / "default" / "versions").iterdir():
        os.utime(path, (1_000, 1_000))
    files.artifacts = elsewhere
    files.tick()
    left = {path.name for path in (elsewhere / "default" / "versions").iterdir()}
    assert left == {paths[number].name for number in (0, *range(10, 30))}
    assert copy.exists()


@pytest.mark.parametrize("missing", [29, 4])
def test_nothing_goes_where_the_head_or_the_live_version_is_missing(files: Files, missing: int) -> None:
    paths = files.versions(30)
    with files.database.write() as session:
        session.execute(update(Policy).values(head=29, live=4))
    paths[missing].rename(files.artifacts / "lost")
    orphan = files.directory("versions", f"default-v9-{uuid4()}", age_s=ORPHAN_AGE_S + 60)
    retention = Retention(files.database, files.artifacts, 30.0)
    retention.tick()
    retention.tick()
    assert [number for number, path in enumerate(paths) if not path.exists()] == [missing]
    assert orphan.exists()
    with files.database.read() as session:
        told = session.scalars(select(Event)).one()
        assert session.scalars(select(PolicyVersion).where(PolicyVersion.files_deleted_at.is_not(None))).all() == []
    assert told.kind == "retention_refused"
    assert paths[missing].name in told.message


def test_bodies_go_after_their_time_and_tokens_stay(files: Files) -> None:
    files.versions(1)
    month_old = UUID(int=int((time.time() - 31 * 86400) * 1000) << 80 | 0x7 << 76)
    old = files.interaction(0, InteractionState.COMPLETED, id=month_old)
    new = files.interaction(0, InteractionState.COMPLETED)
    files.tick(bodies_kept_days=30.0)
    with files.database.read() as session:
        first, second = session.get_one(Interaction, old), session.get_one(Interaction, new)
    assert (first.request, first.response) == (None, None)
    assert first.completion_ids is not None
    assert first.completion_ids.tolist() == [3]
    assert (second.request, second.response) == (b"request", b"response")

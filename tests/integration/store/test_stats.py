from datetime import timedelta

import pytest
from sqlalchemy import event, func, select, update

from app.db.models import Interaction, Rollout
from app.db.repositories.stats import policy_stats, update_series
from app.db.repositories.versions import get_version
from app.db.types import clock
from app.rollouts.learning import RolloutSummary, commit_update, fail_update
from app.rollouts.lifecycle import close_rollout
from app.rollouts.states import SkipReason
from tests.integration.store.world import World, done


def test_a_policy_without_traffic(world: World) -> None:
    with world.database.read() as session:
        stats = policy_stats(session, world.policy())
    assert stats["rollouts"] == {"open": 0, "ready": 0, "training": 0, "trained": 0, "skipped": 0}
    assert stats["reward"] == {"mean_64": None, "mean_256": None}
    assert stats["swap_s"] == {"median": None, "p99": None, "versions": 0}
    assert (stats["skipped"], stats["interactions"], stats["untrained"], stats["updates"]) == ({}, {}, {}, [])
    assert (stats["head"], stats["live"], stats["learner_seen_at"], stats["idle_reason"]) == (0, None, None, None)


def test_counts_by_state_and_reason(world: World) -> None:
    world.begin()
    world.rewarded()
    opted_out = world.call(untrainable=SkipReason.OPTED_OUT).rollout_id
    world.feedback(1.0, rollout=opted_out)
    unrewarded = world.rollout(world.call().rollout_id)
    with world.database.write() as session:
        close_rollout(session, unrewarded)
    with world.database.read() as session:
        stats = policy_stats(session, world.policy())
    assert stats["rollouts"] == {"open": 1, "ready": 1, "training": 0, "trained": 0, "skipped": 2}
    assert stats["skipped"] == {"opted_out": 1, "no_reward": 1}
    assert stats["interactions"] == {"running": 1, "completed": 3}
    assert stats["untrained"] == {"opted_out": 1}
    assert stats["lost_to_age"] == {"stale": 0, "off_lineage": 0}


def test_reward_means_cover_the_newest_rollouts(world: World) -> None:
    with world.database.write() as session:
        now = clock(session)
        for i in range(300):
            session.add(
                Rollout(
                    policy_id=world.policy_id,
                    key_id=world.key.id,
                    state="trained",
                    total_return=0.0 if i < 200 else 1.0,
                    ready_at=now + timedelta(seconds=i),
                )
            )
    with world.database.read() as session:
        assert policy_stats(session, world.policy())["reward"] == {"mean_64": 1.0, "mean_256": 100 / 256}


def test_the_series_of_updates(world: World) -> None:
    first, second = world.rewarded(1.0), world.rewarded(0.0)
    claim = world.batch()
    summaries = {first: RolloutSummary(2, 0.5, 0.1, 0.25), second: RolloutSummary(2, 0.5, 0.1, 0.75)}
    finished = done(claim)
    finished.summaries.update(summaries)
    with world.database.write() as session:
        commit_update(session, claim.update_id, "learner", finished)
    world.rewarded(0.5), world.rewarded(0.5, version=1)
    failing = world.batch()
    with world.database.write() as session:
        fail_update(session, failing.update_id, "learner", "out of memory")
    with world.database.read() as session:
        newest, oldest = update_series(session, world.policy_id)
        assert update_series(session, world.policy_id, before=failing.update_id) == [oldest]
        assert update_series(session, world.policy_id, limit=1) == [newest]
    assert (newest["state"], newest["error"], newest["health"]) == ("failed", "out of memory", None)
    assert (newest["mean_return"], newest["mean_staleness"], newest["max_staleness"]) == (0.5, 0.5, 1)
    assert newest["masked_share"] is None
    assert (oldest["state"], oldest["version"], oldest["rollouts"], oldest["mean_return"]) == ("done", 1, 2, 0.5)
    assert oldest["masked_share"] == 0.5
    assert oldest["health"] == {"ev_after": 0.5}


def test_the_time_from_a_batchs_last_reward_to_its_versions_first_completion(world: World) -> None:
    seconds_of = {1: 10.0, 2: 20.0, 3: 90.0}
    first_calls = {}
    for number in seconds_of:
        assert world.new_version() == number
        first_calls[number] = world.call(version=number).interaction_id
        world.call(version=number)
    world.new_version()  # never served
    with world.database.write() as session:
        for number, seconds in seconds_of.items():
            made = get_version(session, world.policy_id, number)
            assert made is not None
            ready = session.scalar(select(func.max(Rollout.ready_at)).where(Rollout.update_id == made.update_id))
            assert ready is not None
            of_version = update(Interaction).where(Interaction.version == number)
            session.execute(of_version.values(ended_at=ready + timedelta(seconds=seconds + 1)))
            first = of_version.where(Interaction.id == first_calls[number])
            session.execute(first.values(ended_at=ready + timedelta(seconds=seconds)))
    with world.database.read() as session:
        swap = policy_stats(session, world.policy())["swap_s"]
    assert swap == {"median": pytest.approx(20.0), "p99": pytest.approx(90.0), "versions": 3}


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_no_query_reads_a_whole_table(world: World) -> None:
    """SQLite's plans: each figure is found through an index, so that a page stays quick when the log has grown."""
    statements: list[tuple[str, object]] = []
    engine = world.database._reading
    event.listen(engine, "before_cursor_execute", lambda *a: statements.append((a[2], a[3])))
    with world.database.read() as session:
        policy_stats(session, world.policy())
        connection = session.connection()
        recorded, plans = list(statements), []
        for statement, parameters in recorded:
            if statement.startswith("SELECT"):
                plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)  # type: ignore[arg-type]
                plans += [row[3] for row in plan]
    tables = ("rollouts", "interactions", "updates", "update_rollouts", "feedback", "policy_versions")
    assert [plan for plan in plans if plan.split()[:2] in [["SCAN", table] for table in tables]] == []
    assert any("USING" in plan for plan in plans)

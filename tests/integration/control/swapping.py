"""What tests of weight swaps share."""

from datetime import UTC, datetime

from sqlalchemy import update

from app.db.models import Deployment, PolicyVersion
from tests.integration.control.conftest import World

PATIENCE_S = 60.0
"""A pass takes milliseconds; the rest is for a machine that is busy with other things."""
SWAP = ["pause", "reload {}", "label", "resume"]


def swap_calls(*names: str) -> list[str]:
    return [call.format(name) for name in names for call in SWAP]


def let_time_pass(world: World) -> None:
    with world.database.write() as session:
        session.execute(update(PolicyVersion).values(next_deploy_at=None))
        session.execute(update(Deployment).values(updated_at=datetime(2020, 1, 1, tzinfo=UTC)))

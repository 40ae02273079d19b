"""settings of the floor and of centring that have become the form

Policies from before would be refused for settings that nobody knows any more. Updates keep those that they ran with.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0005"
down_revision: str | None = "0004"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

GONE = ("anchor_settled_power", "centring_threshold")


def upgrade() -> None:
    policies = sa.table("policies", sa.column("id"), sa.column("settings", sa.JSON()))
    connection = op.get_bind()
    for policy_id, settings in connection.execute(sa.select(policies.c.id, policies.c.settings)).all():
        kept = {name: value for name, value in settings.items() if name not in GONE}
        connection.execute(policies.update().where(policies.c.id == policy_id).values(settings=kept))


def downgrade() -> None:
    """Their defaults stand in for them."""

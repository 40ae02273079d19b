"""weights that are swapped under running requests"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

import app.db.types

revision: str = "0003"
down_revision: str | None = "0002"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("interactions", sa.Column("version_runs", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("replicas", sa.Column("weights", sa.Text(), nullable=True))
    op.add_column("replicas", sa.Column("swap_began_at", app.db.types.UtcDateTime(timezone=True), nullable=True))
    op.add_column("deployments", sa.Column("paused_ms", sa.Float(), nullable=True))
    op.add_column("deployments", sa.Column("closed_ms", sa.Float(), nullable=True))


def downgrade() -> None:
    op.drop_column("deployments", "closed_ms")
    op.drop_column("deployments", "paused_ms")
    op.drop_column("replicas", "swap_began_at")
    op.drop_column("replicas", "weights")
    op.drop_column("interactions", "version_runs")

"""the base model that a replica serves"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0002"
down_revision: str | None = "0001"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("replicas", sa.Column("base_model", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("replicas", "base_model")

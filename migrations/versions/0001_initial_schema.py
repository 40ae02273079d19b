"""initial schema"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

import app.db.types

revision: str = "0001"
down_revision: str | None = None
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "policies",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("training", sa.String(length=8), nullable=False),
        sa.Column("settings", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("sampling", sa.String(length=8), nullable=False),
        sa.Column("reward_min", sa.Float(), nullable=False),
        sa.Column("reward_max", sa.Float(), nullable=False),
        sa.Column("head", sa.Integer(), nullable=True),
        sa.Column("live", sa.Integer(), nullable=True),
        sa.Column("learning", sa.Boolean(), nullable=False),
        sa.Column("probes", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("checkpoint_update_id", sa.Uuid(), nullable=True),
        sa.Column("updates_done", sa.Integer(), nullable=False),
        sa.Column("learner_seen_at", app.db.types.UtcDateTime(timezone=True), nullable=True),
        sa.Column("idle_reason", sa.Text(), nullable=True),
        sa.Column("created_at", app.db.types.UtcDateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("name"),
    )
    op.create_table(
        "replicas",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("healthy", sa.Boolean(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("seen_at", app.db.types.UtcDateTime(timezone=True), nullable=True),
        sa.Column("noise", sa.JSON(), nullable=False),
        sa.Column("removed", sa.Boolean(), nullable=False),
        sa.Column("owner", sa.String(length=128), nullable=True),
        sa.Column("owned_until", app.db.types.UtcDateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("url"),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("prefix", sa.String(length=16), nullable=False),
        sa.Column("scopes", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("policy_id", sa.Uuid(), nullable=True),
        sa.Column("created_at", app.db.types.UtcDateTime(timezone=True), nullable=False),
        sa.Column("revoked_at", app.db.types.UtcDateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["policy_id"],
            ["policies.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("hash"),
    )
    op.create_table(
        "events",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("at", app.db.types.UtcDateTime(timezone=True), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("policy_id", sa.Uuid(), nullable=True),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["policy_id"],
            ["policies.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.create_index("ix_events_at", ["at"], unique=False)

    op.create_table(
        "updates",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("policy_id", sa.Uuid(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("owner", sa.String(length=128), nullable=False),
        sa.Column("lease_until", app.db.types.UtcDateTime(timezone=True), nullable=False),
        sa.Column("base_version", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=True),
        sa.Column("settings", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("health", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("seconds", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("provenance", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("started_at", app.db.types.UtcDateTime(timezone=True), nullable=False),
        sa.Column("ended_at", app.db.types.UtcDateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["policy_id"],
            ["policies.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("updates", schema=None) as batch_op:
        batch_op.create_index("ix_updates_policy", ["policy_id", "id"], unique=False)
        batch_op.create_index(
            "uq_updates_one_running_per_policy",
            ["policy_id"],
            unique=True,
            sqlite_where=sa.text("state = 'running'"),
            postgresql_where=sa.text("state = 'running'"),
        )

    op.create_table(
        "policy_versions",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("policy_id", sa.Uuid(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("parent", sa.Integer(), nullable=True),
        sa.Column("update_id", sa.Uuid(), nullable=True),
        sa.Column("adapter_name", sa.String(length=256), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("pinned", sa.Boolean(), nullable=False),
        sa.Column("probe", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("deploy_attempts", sa.Integer(), nullable=False),
        sa.Column("next_deploy_at", app.db.types.UtcDateTime(timezone=True), nullable=True),
        sa.Column("live_at", app.db.types.UtcDateTime(timezone=True), nullable=True),
        sa.Column("files_deleted_at", app.db.types.UtcDateTime(timezone=True), nullable=True),
        sa.Column("created_at", app.db.types.UtcDateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["policy_id"],
            ["policies.id"],
        ),
        sa.ForeignKeyConstraint(
            ["update_id"],
            ["updates.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("adapter_name"),
        sa.UniqueConstraint("path"),
        sa.UniqueConstraint("policy_id", "number"),
    )
    op.create_table(
        "rollouts",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("policy_id", sa.Uuid(), nullable=False),
        sa.Column("key_id", sa.Uuid(), nullable=False),
        sa.Column("client_id", sa.String(length=128), nullable=True),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.String(length=32), nullable=True),
        sa.Column("total_return", sa.Float(), nullable=True),
        sa.Column("closing", sa.Boolean(), nullable=False),
        sa.Column("opened_at", app.db.types.UtcDateTime(timezone=True), nullable=False),
        sa.Column("active_at", app.db.types.UtcDateTime(timezone=True), nullable=False),
        sa.Column("closed_at", app.db.types.UtcDateTime(timezone=True), nullable=True),
        sa.Column("ready_at", app.db.types.UtcDateTime(timezone=True), nullable=True),
        sa.Column("update_id", sa.Uuid(), nullable=True),
        sa.Column("retry_group", sa.Uuid(), nullable=True),
        sa.Column("failed_alone", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["key_id"],
            ["api_keys.id"],
        ),
        sa.ForeignKeyConstraint(
            ["policy_id"],
            ["policies.id"],
        ),
        sa.ForeignKeyConstraint(
            ["update_id"],
            ["updates.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("key_id", "policy_id", "client_id"),
    )
    with op.batch_alter_table("rollouts", schema=None) as batch_op:
        batch_op.create_index("ix_rollouts_client", ["client_id"], unique=False)
        batch_op.create_index(
            "ix_rollouts_open",
            ["active_at"],
            unique=False,
            sqlite_where=sa.text("state = 'open'"),
            postgresql_where=sa.text("state = 'open'"),
        )
        batch_op.create_index("ix_rollouts_policy_ready", ["policy_id", "ready_at"], unique=False)
        batch_op.create_index("ix_rollouts_policy_state", ["policy_id", "state", "ready_at"], unique=False)
        batch_op.create_index("ix_rollouts_policy_state_id", ["policy_id", "state", "id"], unique=False)
        batch_op.create_index(
            "ix_rollouts_skipped",
            ["policy_id", "reason"],
            unique=False,
            sqlite_where=sa.text("state = 'skipped'"),
            postgresql_where=sa.text("state = 'skipped'"),
        )
        batch_op.create_index("ix_rollouts_update", ["update_id"], unique=False)

    op.create_table(
        "deployments",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("replica_id", sa.Uuid(), nullable=False),
        sa.Column("version_id", sa.Uuid(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("verdict", sa.String(length=24), nullable=True),
        sa.Column("score", sa.Float(), nullable=True),
        sa.Column("distance", sa.Float(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("loaded_at", app.db.types.UtcDateTime(timezone=True), nullable=True),
        sa.Column("updated_at", app.db.types.UtcDateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["replica_id"],
            ["replicas.id"],
        ),
        sa.ForeignKeyConstraint(
            ["version_id"],
            ["policy_versions.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("replica_id", "version_id"),
    )
    with op.batch_alter_table("deployments", schema=None) as batch_op:
        batch_op.create_index("ix_deployments_version", ["version_id"], unique=False)

    op.create_table(
        "interactions",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("policy_id", sa.Uuid(), nullable=False),
        sa.Column("rollout_id", sa.Uuid(), nullable=False),
        sa.Column("parent_id", sa.Uuid(), nullable=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("new_prompt_ids", app.db.types.Int32Array(), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("completion_ids", app.db.types.Int32Array(), nullable=True),
        sa.Column("logprobs", app.db.types.Float32Array(), nullable=True),
        sa.Column("temperature", sa.Float(), nullable=False),
        sa.Column("sampling", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("finish_reason", sa.String(length=16), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.String(length=32), nullable=True),
        sa.Column("detail", sa.Text(), nullable=True),
        sa.Column("request", sa.LargeBinary(), nullable=True),
        sa.Column("response", sa.LargeBinary(), nullable=True),
        sa.Column("replica", sa.Text(), nullable=True),
        sa.Column("started_at", app.db.types.UtcDateTime(timezone=True), nullable=False),
        sa.Column("first_token_at", app.db.types.UtcDateTime(timezone=True), nullable=True),
        sa.Column("ended_at", app.db.types.UtcDateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["parent_id"],
            ["interactions.id"],
        ),
        sa.ForeignKeyConstraint(
            ["policy_id"],
            ["policies.id"],
        ),
        sa.ForeignKeyConstraint(
            ["rollout_id"],
            ["rollouts.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("interactions", schema=None) as batch_op:
        batch_op.create_index("ix_interactions_policy_state", ["policy_id", "state", "reason"], unique=False)
        batch_op.create_index("ix_interactions_policy_version", ["policy_id", "version", "ended_at"], unique=False)
        batch_op.create_index("ix_interactions_rollout", ["rollout_id", "started_at"], unique=False)
        batch_op.create_index(
            "ix_interactions_running",
            ["started_at"],
            unique=False,
            sqlite_where=sa.text("state = 'running'"),
            postgresql_where=sa.text("state = 'running'"),
        )

    op.create_table(
        "update_rollouts",
        sa.Column("update_id", sa.Uuid(), nullable=False),
        sa.Column("rollout_id", sa.Uuid(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("total_return", sa.Float(), nullable=False),
        sa.Column("staleness", sa.Integer(), nullable=False),
        sa.Column("action_tokens", sa.Integer(), nullable=True),
        sa.Column("advantage_mean", sa.Float(), nullable=True),
        sa.Column("advantage_std", sa.Float(), nullable=True),
        sa.Column("masked_share", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(
            ["rollout_id"],
            ["rollouts.id"],
        ),
        sa.ForeignKeyConstraint(
            ["update_id"],
            ["updates.id"],
        ),
        sa.PrimaryKeyConstraint("update_id", "rollout_id"),
    )
    with op.batch_alter_table("update_rollouts", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_update_rollouts_rollout_id"), ["rollout_id"], unique=False)

    op.create_table(
        "feedback",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("rollout_id", sa.Uuid(), nullable=False),
        sa.Column("interaction_id", sa.Uuid(), nullable=True),
        sa.Column("key_id", sa.Uuid(), nullable=False),
        sa.Column("metric", sa.String(length=64), nullable=False),
        sa.Column("value", sa.Float(), nullable=True),
        sa.Column("final", sa.Boolean(), nullable=False),
        sa.Column("outcome", sa.String(length=32), nullable=True),
        sa.Column("comment", sa.Text(), nullable=True),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("idempotency_key", sa.String(length=128), nullable=True),
        sa.Column("body_sha256", sa.String(length=64), nullable=False),
        sa.Column("answer", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("created_at", app.db.types.UtcDateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["interaction_id"],
            ["interactions.id"],
        ),
        sa.ForeignKeyConstraint(
            ["key_id"],
            ["api_keys.id"],
        ),
        sa.ForeignKeyConstraint(
            ["rollout_id"],
            ["rollouts.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("key_id", "idempotency_key"),
    )
    with op.batch_alter_table("feedback", schema=None) as batch_op:
        batch_op.create_index("ix_feedback_rollout", ["rollout_id"], unique=False)


def downgrade() -> None:
    with op.batch_alter_table("feedback", schema=None) as batch_op:
        batch_op.drop_index("ix_feedback_rollout")

    op.drop_table("feedback")
    with op.batch_alter_table("update_rollouts", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_update_rollouts_rollout_id"))

    op.drop_table("update_rollouts")
    with op.batch_alter_table("interactions", schema=None) as batch_op:
        batch_op.drop_index(
            "ix_interactions_running",
            sqlite_where=sa.text("state = 'running'"),
            postgresql_where=sa.text("state = 'running'"),
        )
        batch_op.drop_index("ix_interactions_rollout")
        batch_op.drop_index("ix_interactions_policy_version")
        batch_op.drop_index("ix_interactions_policy_state")

    op.drop_table("interactions")
    with op.batch_alter_table("deployments", schema=None) as batch_op:
        batch_op.drop_index("ix_deployments_version")

    op.drop_table("deployments")
    with op.batch_alter_table("rollouts", schema=None) as batch_op:
        batch_op.drop_index("ix_rollouts_update")
        batch_op.drop_index(
            "ix_rollouts_skipped",
            sqlite_where=sa.text("state = 'skipped'"),
            postgresql_where=sa.text("state = 'skipped'"),
        )
        batch_op.drop_index("ix_rollouts_policy_state_id")
        batch_op.drop_index("ix_rollouts_policy_state")
        batch_op.drop_index("ix_rollouts_policy_ready")
        batch_op.drop_index(
            "ix_rollouts_open", sqlite_where=sa.text("state = 'open'"), postgresql_where=sa.text("state = 'open'")
        )
        batch_op.drop_index("ix_rollouts_client")

    op.drop_table("rollouts")
    op.drop_table("policy_versions")
    with op.batch_alter_table("updates", schema=None) as batch_op:
        batch_op.drop_index(
            "uq_updates_one_running_per_policy",
            sqlite_where=sa.text("state = 'running'"),
            postgresql_where=sa.text("state = 'running'"),
        )
        batch_op.drop_index("ix_updates_policy")

    op.drop_table("updates")
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.drop_index("ix_events_at")

    op.drop_table("events")
    op.drop_table("api_keys")
    op.drop_table("replicas")
    op.drop_table("policies")

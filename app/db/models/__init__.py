"""The schema. One for SQLite and PostgreSQL; migrations/ builds exactly this (a test compares them)."""

from app.db.models.base import Base
from app.db.models.events import Event
from app.db.models.feedback import Feedback
from app.db.models.keys import ApiKey
from app.db.models.policies import Policy, PolicyVersion
from app.db.models.replicas import Deployment, Replica
from app.db.models.rollouts import Interaction, Rollout
from app.db.models.updates import Update, UpdateRollout

__all__ = [
    "ApiKey",
    "Base",
    "Deployment",
    "Event",
    "Feedback",
    "Interaction",
    "Policy",
    "PolicyVersion",
    "Replica",
    "Rollout",
    "Update",
    "UpdateRollout",
]

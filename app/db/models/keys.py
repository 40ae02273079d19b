from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from app.db.models.base import Base, created_column, id_column


class ApiKey(Base):
    __tablename__ = "api_keys"

    id: Mapped[UUID] = id_column()
    name: Mapped[str] = mapped_column(String(128))
    hash: Mapped[str] = mapped_column(String(64), unique=True)
    """SHA-256 of the key, hex. The key itself is never stored."""
    prefix: Mapped[str] = mapped_column(String(16))
    scopes: Mapped[list[Any]]
    policy_id: Mapped[UUID | None] = mapped_column(ForeignKey("policies.id"))
    """None: every policy."""
    created_at: Mapped[datetime] = created_column()
    revoked_at: Mapped[datetime | None]

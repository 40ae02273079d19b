from datetime import datetime
from typing import Any
from uuid import UUID

import numpy as np
import numpy.typing as npt
from sqlalchemy import JSON, Uuid
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from uuid_utils.compat import uuid7

from app.db.types import Float32Array, Int32Array, UtcDateTime, db_now


class Base(DeclarativeBase):
    type_annotation_map = {  # noqa: RUF012 (SQLAlchemy reads it from the class)
        datetime: UtcDateTime(),
        UUID: Uuid(),
        dict[str, Any]: JSON(none_as_null=True),
        list[Any]: JSON(none_as_null=True),
        npt.NDArray[np.int32]: Int32Array(),
        npt.NDArray[np.float32]: Float32Array(),
    }


def id_column() -> Mapped[UUID]:
    return mapped_column(Uuid(), primary_key=True, default=uuid7)


def created_column() -> Mapped[datetime]:
    return mapped_column(UtcDateTime(), default=db_now())

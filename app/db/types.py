"""Column types shared by SQLite and PostgreSQL: token arrays as compact blobs, UTC times, the database's clock."""

from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy import DateTime, LargeBinary, select
from sqlalchemy.engine import Dialect
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Session
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator


class Int32Array(TypeDecorator[npt.NDArray[np.int32]]):
    """(n,) int32, little-endian bytes."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> bytes | None:
        return None if value is None else np.asarray(value, dtype="<i4").tobytes()

    def process_result_value(self, value: Any, dialect: Dialect) -> npt.NDArray[np.int32] | None:
        return None if value is None else np.frombuffer(value, dtype="<i4")


class Float32Array(TypeDecorator[npt.NDArray[np.float32]]):
    """(n,) float32, little-endian bytes."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> bytes | None:
        return None if value is None else np.asarray(value, dtype="<f4").tobytes()

    def process_result_value(self, value: Any, dialect: Dialect) -> npt.NDArray[np.float32] | None:
        return None if value is None else np.frombuffer(value, dtype="<f4")


class UtcDateTime(TypeDecorator[datetime]):
    """Aware datetimes in UTC; SQLite keeps no zone, so it is put back on the way out."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a time without a zone cannot be stored; use datetime.now(UTC)")
        value = value.astimezone(UTC)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class db_now(FunctionElement[datetime]):  # noqa: N801 (a SQL function, lower case as SQLAlchemy's own)
    """The database's clock in UTC with sub-second resolution; the one clock that all processes share."""

    type = UtcDateTime()
    inherit_cache = True


@compiles(db_now, "sqlite")
def _sqlite_now(element: db_now, compiler: Any, **kw: Any) -> str:
    # SQLAlchemy stores SQLite datetimes with six decimals; the same width keeps text comparison correct
    return "(strftime('%Y-%m-%d %H:%M:%f', 'now') || '000')"


@compiles(db_now, "postgresql")
def _postgresql_now(element: db_now, compiler: Any, **kw: Any) -> str:
    return "clock_timestamp()"


def clock(session: Session) -> datetime:
    """The database's clock now, in UTC, for callers that compare times or store one instant in several rows."""
    return session.execute(select(db_now())).scalar_one()

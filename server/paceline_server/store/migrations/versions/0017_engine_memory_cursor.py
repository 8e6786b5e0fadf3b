"""The entry of the log up to which the stored state of an engine goes"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    cursor = sa.Column("cursor", sa.BigInteger(), nullable=False, server_default="0")
    op.add_column("engine_memories", cursor)

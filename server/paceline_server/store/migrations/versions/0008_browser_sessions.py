"""Tokens that expire, and the token that a browser's session came from"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.add_column("tokens", sa.Column("expires_ns", sa.BigInteger(), nullable=True))
    op.add_column("tokens", sa.Column("parent", sa.String(length=200), nullable=True))

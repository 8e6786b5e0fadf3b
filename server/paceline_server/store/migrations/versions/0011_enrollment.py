"""How many nodes a token may enroll, and which it enrolled"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.add_column("tokens", sa.Column("nodes", sa.BigInteger()))
    op.add_column("node_keys", sa.Column("token", sa.String(200)))

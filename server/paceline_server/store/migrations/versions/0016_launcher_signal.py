"""The signal that asked the launcher of a rank to end"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    op.add_column("ranks", sa.Column("launcher_signal", sa.BigInteger(), nullable=True))

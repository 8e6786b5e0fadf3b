"""Whether the launcher of a rank has ended, too"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    gone: sa.Column[bool] = sa.Column(
        "launcher_gone", sa.Boolean(), nullable=False, server_default=sa.false()
    )
    op.add_column("ranks", gone)

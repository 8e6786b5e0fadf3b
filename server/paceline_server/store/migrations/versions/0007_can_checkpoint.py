"""Whether a job's script saves checkpoints on command"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("can_checkpoint", sa.Boolean(), nullable=True))

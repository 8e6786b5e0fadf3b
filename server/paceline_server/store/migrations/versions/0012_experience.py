"""Facts that a job has shown about its checkpoints and restarts"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("experience", sa.Text(), nullable=True))

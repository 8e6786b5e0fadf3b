"""Times of finished recoveries"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"

_SECONDS = (
    "detect",
    "decide",
    "approve",
    "save",
    "stop",
    "place",
    "launch",
    "start",
    "resume",
    "total",
)


def upgrade() -> None:
    op.create_table(
        "recoveries",
        sa.Column("incident_id", sa.String(64), nullable=False),
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("launcher", sa.String(32), nullable=False),
        sa.Column("resumed_ns", sa.BigInteger(), nullable=False),
        sa.Column("lost_steps", sa.BigInteger(), nullable=True),
        *(sa.Column(f"{part}_seconds", sa.Double(), nullable=True) for part in _SECONDS),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_recoveries_job_id"),
        sa.PrimaryKeyConstraint("incident_id", name="pk_recoveries"),
    )
    op.create_index("ix_recoveries_job_id", "recoveries", ["job_id"])
    op.create_index("ix_recoveries_resumed_ns", "recoveries", ["resumed_ns"])

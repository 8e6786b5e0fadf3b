"""Requests to the launchers that own external jobs"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.create_table(
        "launches",
        sa.Column("action_id", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("created_ns", sa.BigInteger(), nullable=False),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("result", sa.Text(), nullable=False),
        sa.Column("next_ns", sa.BigInteger(), nullable=False),
        sa.Column("finished_ns", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_launches_job_id"),
        sa.PrimaryKeyConstraint("action_id", "kind", name="pk_launches"),
    )
    op.create_index("ix_launches_job_id", "launches", ["job_id"])
    op.create_index("ix_launches_finished_ns", "launches", ["finished_ns"])

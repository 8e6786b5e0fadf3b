"""Store per-rank values of steps separately from the summaries"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "step_shares",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("rank", sa.LargeBinary(), nullable=False),
        sa.Column("self_seconds", sa.LargeBinary(), nullable=False),
        sa.Column("slowdown", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_step_shares_job_id")),
        sa.PrimaryKeyConstraint("job_id", "step", "generation", name=op.f("pk_step_shares")),
    )

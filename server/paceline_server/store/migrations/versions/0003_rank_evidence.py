"""Store the newest stacks and Flight Recorder dump of each rank"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "rank_evidence",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("received_ns", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_rank_evidence_job_id")),
        sa.PrimaryKeyConstraint("job_id", "rank", "kind", name=op.f("pk_rank_evidence")),
    )

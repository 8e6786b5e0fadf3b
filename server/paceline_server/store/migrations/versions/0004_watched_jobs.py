"""External jobs, and the ranks that agents found running"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    no = sa.false()
    op.add_column("jobs", sa.Column("watched", sa.Boolean(), nullable=False, server_default=no))
    op.create_table(
        "attachments",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=False),
        sa.Column("agent_id", sa.String(length=128), nullable=False),
        sa.Column("started_ns", sa.BigInteger(), nullable=False),
        sa.Column("world_size", sa.BigInteger(), nullable=False),
        sa.Column("received_ns", sa.BigInteger(), nullable=False),
        sa.Column("placed", sa.Boolean(), nullable=False),
        sa.Column("identity", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "generation", "rank", name=op.f("pk_attachments")),
    )
    op.create_index(op.f("ix_attachments_placed"), "attachments", ["placed"])

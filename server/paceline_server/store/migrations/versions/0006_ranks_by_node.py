"""Index of ranks by node"""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.create_index(op.f("ix_ranks_agent_id"), "ranks", ["agent_id"], unique=False)

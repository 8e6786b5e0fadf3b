"""Order of incidents: worst first"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.add_column(
        "incidents", sa.Column("urgency", sa.Double(), nullable=False, server_default=sa.text("0"))
    )
    op.execute(
        "UPDATE incidents SET urgency = CASE WHEN state = 'resolved' THEN -1 "
        "WHEN severity = 'critical' THEN 4 WHEN severity = 'warning' THEN 2 ELSE 0 END"
    )
    op.create_index(op.f("ix_incidents_urgency"), "incidents", ["urgency"], unique=False)

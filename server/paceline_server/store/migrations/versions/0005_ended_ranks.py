"""Exit time of attached ranks whose run is still incomplete"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("attachments", sa.Column("ended_ns", sa.BigInteger(), nullable=True))

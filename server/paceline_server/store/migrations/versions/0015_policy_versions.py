"""Versions of policies, and which one a job has"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"

_REFUSAL = "versions of policies are append-only"


def upgrade() -> None:
    op.create_table(
        "policy_versions",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("job_id", sa.String(64), nullable=True),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("at_ns", sa.BigInteger(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("comment", sa.Text(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_policy_versions"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_policy_versions_job_id_id", "policy_versions", ["job_id", "id"])
    op.add_column("jobs", sa.Column("policy_version", sa.BigInteger(), nullable=True))
    if op.get_bind().dialect.name == "sqlite":
        for verb in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER policy_versions_refuse_{verb.lower()} BEFORE {verb} "
                f"ON policy_versions BEGIN SELECT RAISE(ABORT, '{_REFUSAL}'); END"
            )
        return
    op.execute(
        "CREATE FUNCTION refuse_policy_version_change() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION '{_REFUSAL}'; END $$"
    )
    op.execute(
        "CREATE TRIGGER policy_versions_refuse_change BEFORE UPDATE OR DELETE OR TRUNCATE "
        "ON policy_versions FOR EACH STATEMENT EXECUTE FUNCTION refuse_policy_version_change()"
    )

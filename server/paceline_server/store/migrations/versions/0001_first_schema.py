"""The first schema"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    _create_tables()
    op.execute("INSERT INTO counters (name, value) VALUES ('command', 0)")
    _protect_audit()


def _protect_audit() -> None:
    """Reject updates and deletes of the audit log."""
    if op.get_bind().dialect.name == "sqlite":
        for verb in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER audit_refuses_{verb.lower()} BEFORE {verb} ON audit "
                "BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END"
            )
        return
    op.execute(
        "CREATE FUNCTION refuse_audit_change() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'the audit log is append-only'; END $$"
    )
    op.execute(
        "CREATE TRIGGER audit_refuses_change BEFORE UPDATE OR DELETE OR TRUNCATE ON audit "
        "FOR EACH STATEMENT EXECUTE FUNCTION refuse_audit_change()"
    )


def _create_tables() -> None:
    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("at_ns", sa.BigInteger(), nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=True),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("verb", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_audit_job_id_id"), "audit", ["job_id", "id"], unique=False)

    op.create_table(
        "boots",
        sa.Column("agent_id", sa.String(length=128), nullable=False),
        sa.Column("boot_id", sa.String(length=128), nullable=False),
        sa.Column("first_seen_ns", sa.BigInteger(), nullable=False),
        sa.Column("pruned_sequence", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("agent_id", "boot_id", name=op.f("pk_boots")),
    )
    op.create_table(
        "changes",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=True),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("subject", sa.String(length=128), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_changes")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_changes_job_id_id"), "changes", ["job_id", "id"], unique=False)

    op.create_table(
        "counters",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_counters")),
    )
    op.create_table(
        "hot_log",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("agent_id", sa.String(length=128), nullable=False),
        sa.Column("boot_id", sa.String(length=128), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("received_ns", sa.BigInteger(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_hot_log")),
        sa.UniqueConstraint(
            "agent_id", "boot_id", "sequence", name=op.f("uq_hot_log_agent_id_boot_id_sequence")
        ),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_hot_log_received_ns"), "hot_log", ["received_ns"], unique=False)

    op.create_table(
        "jobs",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("topology", sa.Text(), nullable=False),
        sa.Column("created_ns", sa.BigInteger(), nullable=False),
        sa.Column("started_ns", sa.BigInteger(), nullable=True),
        sa.Column("finished_ns", sa.BigInteger(), nullable=True),
        sa.Column("stop_requested", sa.Boolean(), nullable=False),
        sa.Column("cursor", sa.BigInteger(), nullable=False),
        sa.Column("ticked_ns", sa.BigInteger(), nullable=True),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("highest_step", sa.BigInteger(), nullable=True),
        sa.Column("checkpoint_step", sa.BigInteger(), nullable=True),
        sa.Column("step_seconds", sa.Double(), nullable=True),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("evaluation_loss", sa.Double(), nullable=True),
        sa.Column("ledger", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
    )
    op.create_index(op.f("ix_jobs_state"), "jobs", ["state"], unique=False)

    op.create_table(
        "leases",
        sa.Column("name", sa.String(length=80), nullable=False),
        sa.Column("owner", sa.String(length=200), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("expires_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_leases")),
    )
    op.create_table(
        "nodes",
        sa.Column("agent_id", sa.String(length=128), nullable=False),
        sa.Column("boot_id", sa.String(length=128), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("packed_ns", sa.BigInteger(), nullable=False),
        sa.Column("last_seen_ns", sa.BigInteger(), nullable=False),
        sa.Column("hello", sa.Text(), nullable=True),
        sa.Column("readings", sa.Text(), nullable=False),
        sa.Column("dropped_batches", sa.BigInteger(), nullable=False),
        sa.Column("quarantine_reason", sa.Text(), nullable=True),
        sa.Column("job_id", sa.String(length=64), nullable=True),
        sa.PrimaryKeyConstraint("agent_id", name=op.f("pk_nodes")),
    )
    op.create_index(op.f("ix_nodes_job_id"), "nodes", ["job_id"], unique=False)

    op.create_table(
        "outbox",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("receiver", sa.String(length=32), nullable=False),
        sa.Column("subject", sa.String(length=64), nullable=False),
        sa.Column("event", sa.String(length=32), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("created_ns", sa.BigInteger(), nullable=False),
        sa.Column("attempts", sa.BigInteger(), nullable=False),
        sa.Column("next_attempt_ns", sa.BigInteger(), nullable=False),
        sa.Column("finished_ns", sa.BigInteger(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outbox")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        op.f("ix_outbox_receiver_finished_ns"), "outbox", ["receiver", "finished_ns"], unique=False
    )

    op.create_table(
        "tokens",
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("scope", sa.String(length=16), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("created_ns", sa.BigInteger(), nullable=False),
        sa.Column("revoked_ns", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_tokens")),
        sa.UniqueConstraint("hash", name=op.f("uq_tokens_hash")),
    )
    op.create_table(
        "actions",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("incident_id", sa.String(length=64), nullable=True),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("restart_of", sa.BigInteger(), nullable=True),
        sa.Column("created_ns", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("noticed", sa.Boolean(), nullable=False),
        sa.Column("view", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_actions_job_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_actions")),
        sa.UniqueConstraint("job_id", "restart_of", name=op.f("uq_actions_job_id_restart_of")),
    )
    op.create_index(op.f("ix_actions_created_ns"), "actions", ["created_ns"], unique=False)
    op.create_index(op.f("ix_actions_job_id_state"), "actions", ["job_id", "state"], unique=False)

    op.create_table(
        "commands",
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("agent_id", sa.String(length=128), nullable=False),
        sa.Column("action_id", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("created_ns", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("finished_ns", sa.BigInteger(), nullable=True),
        sa.Column("ok", sa.Boolean(), nullable=True),
        sa.Column("detail", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_commands_job_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_commands")),
    )
    op.create_index(op.f("ix_commands_action_id"), "commands", ["action_id"], unique=False)
    op.create_index(
        op.f("ix_commands_agent_id_finished_ns"),
        "commands",
        ["agent_id", "finished_ns"],
        unique=False,
    )
    op.create_index(op.f("ix_commands_job_id"), "commands", ["job_id"], unique=False)

    op.create_table(
        "engine_memories",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("memory", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_engine_memories_job_id")),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_engine_memories")),
    )
    op.create_table(
        "generations",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("cursor", sa.BigInteger(), nullable=False),
        sa.Column("placement", sa.Text(), nullable=False),
        sa.Column("restarted", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_generations_job_id")),
        sa.PrimaryKeyConstraint("job_id", "generation", name=op.f("pk_generations")),
    )
    op.create_table(
        "incidents",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("severity", sa.String(length=16), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("opened_ns", sa.BigInteger(), nullable=False),
        sa.Column("resolved_ns", sa.BigInteger(), nullable=True),
        sa.Column("view", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_incidents_job_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_incidents")),
    )
    op.create_index(
        op.f("ix_incidents_job_id_state"), "incidents", ["job_id", "state"], unique=False
    )
    op.create_index(op.f("ix_incidents_opened_ns"), "incidents", ["opened_ns"], unique=False)

    op.create_table(
        "ranks",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("agent_id", sa.String(length=128), nullable=False),
        sa.Column("local_rank", sa.BigInteger(), nullable=False),
        sa.Column("gpu", sa.BigInteger(), nullable=True),
        sa.Column("pid", sa.BigInteger(), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("status", sa.String(length=32), nullable=True),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("operation", sa.Text(), nullable=True),
        sa.Column("operation_seconds", sa.Double(), nullable=True),
        sa.Column("process_state", sa.String(length=8), nullable=True),
        sa.Column("exit_code", sa.BigInteger(), nullable=True),
        sa.Column("signal", sa.BigInteger(), nullable=True),
        sa.Column("commanded", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_ranks_job_id")),
        sa.PrimaryKeyConstraint("job_id", "rank", name=op.f("pk_ranks")),
    )
    op.create_table(
        "steps",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("summary", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_steps_job_id")),
        sa.PrimaryKeyConstraint("job_id", "step", "generation", name=op.f("pk_steps")),
    )
    op.create_table(
        "acknowledgements",
        sa.Column("command_id", sa.BigInteger(), nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["command_id"], ["commands.id"], name=op.f("fk_acknowledgements_command_id")
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_acknowledgements_job_id")),
        sa.PrimaryKeyConstraint("command_id", "rank", name=op.f("pk_acknowledgements")),
    )
    op.create_index(
        op.f("ix_acknowledgements_job_id"), "acknowledgements", ["job_id"], unique=False
    )

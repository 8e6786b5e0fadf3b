"""Alembic's environment. `Database.migrate` always provides the connection."""

from __future__ import annotations

from alembic import context

from paceline_server.store.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
)
context.run_migrations()

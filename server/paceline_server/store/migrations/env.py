"""Alembic's entry: the connection is always given by `Database.migrate`."""

from __future__ import annotations

from alembic import context

from paceline_server.store.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
)
context.run_migrations()

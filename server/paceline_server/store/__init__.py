"""SQLAlchemy models, migrations and queries."""

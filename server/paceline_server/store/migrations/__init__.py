"""The schema's history, run by `Database.migrate`."""

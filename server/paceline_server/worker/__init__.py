"""The job worker: lease, fenced transaction, engine, decisions."""

"""The engine of one job: batches and time in; steps, findings and the ledger out. Pure."""

"""The engine of one job: turns batches and time into steps, findings and the ledger. Pure."""

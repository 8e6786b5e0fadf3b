"""Pack measurements into batches, spool them on disk and send them to the server."""

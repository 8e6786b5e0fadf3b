"""From samples to the server: pack, spool, send."""

"""Launchers that own external jobs, one file per backend behind the protocol of `contract`."""

"""One file per sub-command of `paceline`."""

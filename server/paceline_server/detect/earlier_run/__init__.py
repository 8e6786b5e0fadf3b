"""The detector of kind `earlier_run`."""

"""The detector of kind `transient_stall`."""

"""The detector of kind `checkpoint_stall`."""

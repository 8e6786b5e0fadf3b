"""The detector of kind `checkpoint_failure`."""

"""The detector of kind `sequence_variance`."""

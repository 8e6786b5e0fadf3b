"""The detector of kind `loss`."""

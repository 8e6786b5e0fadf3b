"""The detector of kind `hang`."""

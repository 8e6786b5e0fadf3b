"""The detector of kind `bubble`."""

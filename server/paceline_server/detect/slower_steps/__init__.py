"""The detector of kind `slower_steps`."""

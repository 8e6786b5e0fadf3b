"""The detector of kind `slow_link`."""

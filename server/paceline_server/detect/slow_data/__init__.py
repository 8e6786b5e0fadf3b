"""The detector of kind `slow_data`."""

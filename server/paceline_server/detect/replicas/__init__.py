"""The detector of kind `corruption`."""

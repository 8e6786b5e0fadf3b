"""The detector of kind `garbage_collection`."""

"""The detector of kind `rank_exit`."""

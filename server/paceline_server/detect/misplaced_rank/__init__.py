"""The detector of kind `misplaced_rank`."""

"""The detector of kind `slow_evaluation`."""

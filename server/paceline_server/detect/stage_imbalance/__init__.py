"""The detector of kind `stage_imbalance`."""

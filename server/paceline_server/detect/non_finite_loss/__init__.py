"""The detector of kind `non_finite_loss`."""

"""The detector of kind `routing_imbalance`."""

"""The detector of kind `lost_node`."""

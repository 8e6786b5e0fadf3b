"""The detector of kind `lost_gpu`."""

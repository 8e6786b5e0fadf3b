"""The detector of kind `host_noise`."""

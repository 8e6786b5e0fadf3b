"""What the nvml collector reads of each GPU, and how it survives one that does not answer."""

"""Values that the nvml collector reads from each GPU, and handling of GPUs that hang."""

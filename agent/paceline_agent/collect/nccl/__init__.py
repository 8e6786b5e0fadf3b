"""What NCCL tells of itself: the Inspector's lines, its debug log, a process' environment."""

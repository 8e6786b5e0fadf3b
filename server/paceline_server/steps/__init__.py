"""The step model: what each rank did in each step: compute, wait or idle."""

"""Other programs that restart trainings, for comparison in the same run."""

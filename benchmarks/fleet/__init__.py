"""A large simulated job: numpy computes its steps, simulated agents send the batches."""

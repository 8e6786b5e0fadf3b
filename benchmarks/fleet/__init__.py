"""A large job that exists only as batches: played with numpy, sent by simulated agents."""

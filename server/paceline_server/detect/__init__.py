"""Pure detectors, one per file: facts of steps, nodes and ranks in, findings out."""

"""Pure detectors, one per folder: measurements of steps, nodes and ranks in, findings out."""

"""Pure detectors, one per folder, that turn measurements of steps, nodes and ranks into
findings."""

"""Statistics that detectors share."""

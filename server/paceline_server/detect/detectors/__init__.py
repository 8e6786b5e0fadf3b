"""One detector per file; see `paceline_server.detect.detector`."""

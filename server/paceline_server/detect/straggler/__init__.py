"""The detector of kind `straggler`."""

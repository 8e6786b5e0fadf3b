"""The web dashboard's built assets, under `static/`."""

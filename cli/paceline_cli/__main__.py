"""`python -m paceline_cli` is `paceline`."""

from paceline_cli.main import run_main

run_main()

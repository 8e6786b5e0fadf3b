"""`python -m paceline.collectives` builds the library that records process groups."""

from paceline.collectives.build import main

main()

"""`python -m growprune`: the same as the command `growprune`."""

from growprune.cli import main

main()

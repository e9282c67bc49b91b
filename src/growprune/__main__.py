"""`python -m growprune`: the same as the command `growprune`."""

from growprune.cli import main

if __name__ == "__main__":
    main()

"""`python -m kici`: the same as the command `kici`."""

from kici.cli.main import main

if __name__ == "__main__":
    main()

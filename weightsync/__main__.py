"""`python -m weightsync` is the `weightsync` command."""

from weightsync.cli import main

if __name__ == "__main__":
    main()

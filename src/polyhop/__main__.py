"""``python -m polyhop``: the same as the command ``polyhop``, for launchers that start a module."""

from polyhop.cli import main

if __name__ == "__main__":
    main()

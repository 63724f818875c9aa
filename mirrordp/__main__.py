"""`python -m mirrordp`."""

from mirrordp.cli import command

if __name__ == "__main__":
    command()

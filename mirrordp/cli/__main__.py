"""`python -m mirrordp.cli`."""

from mirrordp.cli import command

if __name__ == "__main__":
    command()

"""``python -m xla_attention info`` prints what this installation contains and which front-ends can run."""

import argparse

from ._info import info


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m xla_attention", description=__doc__)
    parser.add_argument("command", choices=["info"], help="what to print")
    parser.parse_args()
    print(info())


if __name__ == "__main__":
    main()

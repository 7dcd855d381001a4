"""How a command reports a mistake in its command line."""

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """An argument parser that reports a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the error line, without the usage, and exit with status 2."""
        self.exit(2, f"error: {message}; --help lists all flags\n")

"""What the command lines of this package have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pallas_kernels.bench.records import writable


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong."""

    def error(self, message: str) -> Any:
        self.exit(2, f"{self.prog}: {message}\n")


def names(kind: str, allowed: Iterable[str]) -> Callable[[str], list[str]]:
    """The type of an argument that is a list of names, with commas between."""
    allowed = tuple(allowed)

    def parse(text: str) -> list[str]:
        given = [name.strip() for name in text.split(",") if name.strip()]
        wrong = [name for name in given if name not in allowed]
        if wrong or not given:
            what = ", ".join(map(repr, wrong)) or repr(text)
            raise argparse.ArgumentTypeError(f"{what} is no {kind}; allowed: {', '.join(allowed)}")
        return list(dict.fromkeys(given))

    return parse


def writable_argument(text: str) -> Path:
    """The type of an argument that is a file to write: refused before any work."""
    try:
        return writable(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error

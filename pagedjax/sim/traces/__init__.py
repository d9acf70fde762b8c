"""Where requests' lengths come from, and with some of them arrivals and the hashes of prompts' blocks.

`open_trace` takes a file in one of the public `formats`, or the name of a workload. A workload's real lengths are read
where the folder of the environment variable PAGEDJAX_DATA has them; elsewhere `statistics` that pagedjax ships stand
in. Nothing but the standard library is imported, until a file needs it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pagedjax.config import require
from pagedjax.errors import ConfigError
from pagedjax.scalars import shown
from pagedjax.sim.traces.counting import BUNDLED, token_counter
from pagedjax.sim.traces.formats import detect, format_names, read_file
from pagedjax.sim.traces.rows import Problem, Problems, TraceRow
from pagedjax.sim.traces.statistics import load_statistics
from pagedjax.sim.traces.workloads import FILES

__all__ = ["Problem", "Problems", "Trace", "TraceRow", "format_names", "open_trace", "workload_names"]

DATA_VARIABLE = "PAGEDJAX_DATA"


@dataclass
class Trace:
    """Where rows come from.

    Attributes:
        description: a sentence without a full stop, for whoever reads results.
        is_statistics: whether they are drawn from statistics, and not read from a file.
        has_times: whether rows have arrivals.
        block_tokens: tokens of a prompt for each of its hashes, 0 where rows have none.
        problems: what was wrong with the rows that `rows` has read so far, in its latest call.
    """

    name: str
    description: str
    is_statistics: bool
    has_times: bool
    block_tokens: int
    _read: Callable[[int, Problems], Iterator[TraceRow]] = field(repr=False)
    problems: Problems = field(default_factory=Problems)

    def rows(self, seed: int = 0) -> Iterator[TraceRow]:
        """All rows of a file, in its order, from its start; or drawn from statistics, without end.

        Args:
            seed: of what is drawn.

        Raises:
            ConfigError: while reading, if the file cannot be read, or has not one row that can be used.
        """
        self.problems = Problems()
        return self._read(seed, self.problems)


def workload_names() -> tuple[str, ...]:
    """The workloads that are known by name."""
    return tuple(FILES)


def open_trace(name_or_path: str | Path, *, format: str | None = None, tokenizer: str | None = None) -> Trace:
    """The trace of a known workload, or of a file.

    Args:
        name_or_path: a name of `workload_names()`, or a path. ("./alpaca" is a file even if "alpaca" is a workload.)
        format: one of `format_names()`, for a file that could be of several.
        tokenizer: for a file of texts: a local folder or what `transformers` knows, instead of the bundled model's.

    Raises:
        ConfigError: there is no such workload or file, PAGEDJAX_DATA is no folder, the file cannot be read or is of no
            known format, or an argument has no use here.
        ModelError: the tokenizer is broken.
        DownloadError: the bundled model's tokenizer is not on this machine and cannot be downloaded.
    """
    name = str(name_or_path)
    if name not in FILES:
        return _open_file(name, _existing(name), format, tokenizer)
    path, reason = _find_real(name)
    if path is not None:
        return _open_file(name, path, format, tokenizer)
    for argument, given in (("format", format), ("tokenizer", tokenizer)):
        require(given is None, argument, given, f"None where statistics stand in for a file ({reason})")
    return _open_statistics(name, reason)


def _existing(name: str) -> Path:
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        raise ConfigError(f"{name} is a folder: a trace is a file, or one of {', '.join(FILES)}")
    if not os.path.exists(path):
        raise ConfigError(f"{shown(name)} is neither a file nor a known workload, which are {', '.join(FILES)}")
    return Path(path)


def _find_real(name: str) -> tuple[Path | None, str]:
    """The real file of a workload, or why there is none."""
    folder = os.environ.get(DATA_VARIABLE)
    if not folder:
        return None, f"{DATA_VARIABLE} is not set"
    require(Path(folder).is_dir(), DATA_VARIABLE, folder, "a folder")
    for file_name in FILES[name]:
        if (Path(folder) / file_name).is_file():
            return Path(folder) / file_name, ""
    return None, f"the folder of {DATA_VARIABLE} has no {' or '.join(FILES[name])}"


def _open_file(name: str, path: Path, format: str | None, tokenizer: str | None) -> Trace:
    form, head = detect(path, format)
    require(
        tokenizer is None or form.holds_text,
        "tokenizer",
        tokenizer,
        f"None for a file of the format {form.name}, whose tokens are counted already",
    )
    count_tokens = token_counter(tokenizer) if form.holds_text else None
    counted = f"tokens counted with the tokenizer of {tokenizer or BUNDLED}" if form.holds_text else ""
    details = ", ".join(filter(None, (head.notes.get("dataset", f"format {form.name}"), counted)))
    return Trace(
        name,
        f"the real lengths of {path.name} ({details})",
        is_statistics=False,
        has_times=not set(form.time).isdisjoint(head.names),
        block_tokens=form.block_tokens,
        _read=lambda seed, problems: read_file(path, form, head, problems, count_tokens),
    )


def _open_statistics(name: str, reason: str) -> Trace:
    statistics = load_statistics(name)
    return Trace(
        name,
        f"statistics that pagedjax ships stand in for the real lengths ({reason}): joint histogram of "
        f"{statistics.num_rows:,} rows of {statistics.title}, means off by at most {statistics.mean_error:.2f} %",
        is_statistics=True,
        has_times=False,
        block_tokens=0,
        _read=lambda seed, problems: statistics.draw(seed),
    )

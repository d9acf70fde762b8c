"""Records of a run, simulated or real, as lines of JSON."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from pagedjax.errors import PagedJaxError
from pagedjax.sim.records import RequestRecord, StepRecord


@contextmanager
def record_file(path: str) -> Iterator[IO[str]]:
    """A file to write records to. A run that is cut short leaves what there is."""
    opened = gzip.open if path.endswith(".gz") else open
    try:
        with opened(path, "wt", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise PagedJaxError(f"cannot write {path} ({error.strerror})") from error


class RecordWriter:
    """Writes each record as a line, with all its fields."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._encode = json.JSONEncoder(separators=(",", ":")).encode

    def step(self, step: StepRecord) -> None:
        """Of the shape and of the usage, each field by its own name."""
        record: dict[str, Any] = {"record": "step", **step._asdict()}
        record |= record.pop("shape")._asdict() | record.pop("usage")._asdict()
        self._file.write(self._encode(record) + "\n")

    def request(self, request: RequestRecord) -> None:
        """With its normalized latency, where it has one."""
        latency = request.normalized_latency if request.output_len else None
        record = {"record": "request", **request._asdict(), "normalized_latency_s": latency}
        self._file.write(self._encode(record) + "\n")

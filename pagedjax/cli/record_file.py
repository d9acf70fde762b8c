"""Records of a run, simulated or real, as lines of JSON."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from pagedjax.errors import PagedJaxError
from pagedjax.sim.records import RequestRecord, StepRecord


@contextmanager
def record_file(path: str) -> Iterator[IO[str]]:
    """A file to write records to, gzipped if its name ends with .gz. Unless all goes well, what was there stays."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}") if target.is_file() or not target.exists() else target
    try:
        with gzip.open(partial, "wt", encoding="utf-8") if path.endswith(".gz") else open(partial, "w") as file:
            yield file
        if partial != target:
            partial.replace(target)
    except OSError as error:
        raise PagedJaxError(f"cannot write {path} ({error.strerror})") from error
    finally:
        if partial != target:
            partial.unlink(missing_ok=True)


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

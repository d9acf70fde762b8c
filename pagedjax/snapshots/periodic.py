"""Snapshots every so many steps of a run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

from pagedjax.config import EngineConfig
from pagedjax.errors import ConfigError, SnapshotError
from pagedjax.snapshots.files import check_root


class PeriodicSnapshots:
    """Calls `save` when it is time.

    Args:
        path: folder of the snapshots.
        every: steps between two.

    Raises:
        ConfigError: nothing can be written into the folder.
    """

    def __init__(self, path: str, every: int, save: Callable[[str], object]) -> None:
        self._path, self._every, self._save = path, every, save
        self._saved_at: int | None = None
        try:
            check_root(Path(path))
        except OSError as error:
            raise ConfigError(
                f"snapshot_path={path!r} is not allowed: it must be a folder that can be written to ({error.strerror})"
            ) from error

    @classmethod
    def of(cls, config: EngineConfig, save: Callable[[str], object]) -> PeriodicSnapshots | None:
        """What the configuration asks for; None if it asks for none."""
        if config.snapshot_path is None or config.snapshot_every is None:
            return None
        return cls(config.snapshot_path, config.snapshot_every, save)

    def save_if_due(self, num_steps: int) -> None:
        """Saves, if enough steps were made since it was done. If that fails, says so and lets the run go on."""
        if self._saved_at is None:
            self._saved_at = num_steps - 1  # this engine's first step
        if num_steps - self._saved_at < self._every:
            return
        self._saved_at = num_steps
        try:
            self._save(self._path)
        except Exception as error:  # whatever it is, it must not end a run of hours
            said = str(error) if isinstance(error, SnapshotError) else f"no snapshot was written: {error!r}"
            warnings.warn(f"{said}; the run goes on", RuntimeWarning, stacklevel=2)

"""A running engine on disk, and back: `Engine.save` and `Engine.restore`."""

from pagedjax.snapshots.files import list_snapshots

__all__ = ["list_snapshots"]

"""Every error that pagedjax raises on purpose.

All derive from `PagedJaxError`; those that a wrong argument causes are `ValueError` too, so that callers who know
nothing of pagedjax can still catch them.
"""


class PagedJaxError(Exception):
    """Base of all errors raised on purpose by pagedjax."""


class ConfigError(PagedJaxError, ValueError):
    """A configuration value is outside what is allowed, or two of them contradict each other."""


class InvalidRequest(PagedJaxError, ValueError):
    """A request cannot be served as written: an empty prompt, a token id outside the vocabulary, a bad parameter."""


class RequestTooLong(InvalidRequest):
    """A prompt that is longer than the model, the step or the whole pool allows."""


class UnknownRequest(PagedJaxError, KeyError):
    """A request id that the engine does not hold."""

    def __str__(self) -> str:  # KeyError prints the repr of its argument, which hides the sentence in quotes
        return str(self.args[0]) if self.args else ""


class EngineDead(PagedJaxError):
    """An engine whose last step was cut short (by an error, or a second Ctrl-C): host and device no longer agree."""


class OutOfBlocks(PagedJaxError):
    """The pool has fewer free blocks than were asked for."""


class BlocksInUse(PagedJaxError):
    """The prefix cache cannot be reset: somebody holds blocks."""


class OutOfSlots(PagedJaxError):
    """No further sequence may run at the same time."""


class DoubleFree(PagedJaxError):
    """A block was given back more often than it was taken."""


class UnknownBlock(PagedJaxError, ValueError):
    """A block id that the pool never handed out."""


class InvariantError(PagedJaxError):
    """`check_invariants()` found a state machine in a state it can never reach: a bug."""


class ModelError(PagedJaxError, ValueError):
    """A model cannot be loaded: unknown type, a file missing, cut short or altered, a tensor missing or misshapen."""


class CheckpointError(ModelError):
    """A converted checkpoint is incomplete or does not match its own description."""


class DownloadError(PagedJaxError):
    """Weights are neither cached nor to be had: no network, or the package index does not answer."""


class SnapshotError(PagedJaxError, ValueError):
    """A snapshot of host state is not of a form that `restore()` can read."""


class LogError(PagedJaxError, ValueError):
    """A log of events that cannot be read: no log, one of another version, or damaged in the middle."""

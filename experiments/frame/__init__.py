"""What all experiments share: their discovery, configurations, store, executors, claims, figures and report."""

from experiments.frame.claims import Claim
from experiments.frame.values import require_choice, require_unused

__all__ = ["Claim", "require_choice", "require_unused"]

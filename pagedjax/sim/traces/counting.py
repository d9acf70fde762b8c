"""Counts the tokens of a text, for traces that hold text."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pagedjax.errors import ConfigError
from pagedjax.scalars import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUNDLED = "smollm2-135m"


def token_counter(name: str | None) -> Callable[[str], int]:
    """A function that counts a text's tokens, without those that a tokenizer would put around it.

    Args:
        name: of a tokenizer: a local folder, or what `transformers` knows; None is the bundled model's.

    Raises:
        ConfigError: there is no such tokenizer.
        ModelError: that in the folder is broken.
        DownloadError: the bundled model is not on this machine and cannot be downloaded.
    """
    tokenizer = _bundled() if name is None else _named(name)
    # verbose: it would warn of a text that is longer than its model takes, which here does no harm
    return lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


# Both import what they need late: transformers takes a second, and most traces are already counted.


def _bundled() -> PreTrainedTokenizerBase:
    from pagedjax.models.cache import workspace
    from pagedjax.models.fetch import fetch_gguf
    from pagedjax.models.gguf import GGUFFile
    from pagedjax.models.registry import KNOWN_MODELS
    from pagedjax.models.tokenizer import tokenizer_from_gguf

    with workspace(BUNDLED) as work:
        path = fetch_gguf(BUNDLED, KNOWN_MODELS[BUNDLED], work)
    tokenizer = tokenizer_from_gguf(GGUFFile(path))
    assert tokenizer is not None
    return tokenizer


def _named(name: str) -> PreTrainedTokenizerBase:
    from pagedjax.models.tokenizer import load_tokenizer

    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        if tokenizer := load_tokenizer(folder):
            return tokenizer
        raise ConfigError(
            f"tokenizer={shown(name)} holds none: a folder must have tokenizer.json, tokenizer_config.json or "
            "tokenizer.model"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # whatever its parsers and the hub raise
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"tokenizer={shown(name)} cannot be loaded ({reason}): it must be a local folder that holds one, or a name "
            "that the Hugging Face hub knows"
        ) from error

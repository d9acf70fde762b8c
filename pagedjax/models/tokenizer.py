"""Tokenizers: built from a GGUF's own metadata (no torch needed), saved beside a checkpoint, loaded again."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pagedjax.errors import ModelError
from pagedjax.models.gguf import GGUFFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

# transformers is imported late, by those who need a tokenizer (it takes a second), and its advice to install torch
# would be wrong here: nothing of it needs torch
logging.getLogger("transformers").addFilter(lambda record: "PyTorch was not found" not in record.getMessage())

CONTROL_TOKEN = 3  # gguf's TokenType.CONTROL: never made from plain text, not shown in output

_SPECIAL_IDS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def tokenizer_from_gguf(file: GGUFFile) -> PreTrainedTokenizerFast | None:
    """The byte-level BPE tokenizer that a GGUF describes, or None when it describes none.

    Raises:
        ModelError: the tokenizer is of a kind that is not known here.
    """
    from transformers import PreTrainedTokenizerFast

    kind = file.get("tokenizer.ggml.model")
    if kind is None:
        return None
    pre = file.get("tokenizer.ggml.pre")
    if (kind, pre) != ("gpt2", "smollm"):
        raise ModelError(
            f"{file.path}: tokenizer of model {kind!r} with pre-tokenizer {pre!r} cannot be read from a GGUF; "
            "allowed: 'gpt2' with 'smollm'"
        )
    tokens = file.require("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in file.require("tokenizer.ggml.merges")]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    # every digit is a piece of its own; what lies between is cut by GPT-2's expression
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    types = file.require("tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    named = {name: file.get(key) for name, key in _SPECIAL_IDS.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=file.require("llama.context_length"),
        chat_template=file.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **{name: tokens[token_id] for name, token_id in named.items() if token_id is not None},
    )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer that lies in a folder, or None when none does.

    Raises:
        ModelError: there is one and it cannot be read.
    """
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    try:
        return _tokenizer_class(folder).from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers raises whatever its parsers do: OSError, ValueError, KeyError, Exception
        raise ModelError(f"{folder}: its tokenizer cannot be read ({_first_line(error)})") from error


def _tokenizer_class(folder: Path) -> Any:
    """The plain class where it is enough: AutoTokenizer would import torch, if there is one, which takes seconds."""
    path = folder / "tokenizer_config.json"
    kind = json.loads(path.read_text()).get("tokenizer_class") if path.is_file() else None
    if kind in ("TokenizersBackend", "PreTrainedTokenizerFast"):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]

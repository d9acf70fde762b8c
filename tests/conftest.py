"""Fixtures that several folders of tests share."""

from __future__ import annotations

import gc
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import jax
import pytest

from pagedjax.errors import DownloadError
from pagedjax.models.cache import workspace
from pagedjax.models.fetch import fetch_gguf
from pagedjax.models.gguf import GGUFFile
from pagedjax.models.loader import LoadedModel, load_model
from pagedjax.models.registry import KNOWN_MODELS
from pagedjax.models.tokenizer import tokenizer_from_gguf

NAME = "smollm2-135m"

# Before JAX computes for the first time: on a machine of two cores, the callbacks of Pallas' interpreters can otherwise
# take all of XLA's threads, and then wait for one for ever.
os.environ.setdefault("NPROC", "16")

# A shell that starts the tests in its background has them ignore Ctrl-C, which some of them are about.
signal.signal(signal.SIGINT, signal.default_int_handler)

# a shared machine is slow at times, which says nothing about the code
hypothesis.settings.register_profile("pagedjax", deadline=None)
hypothesis.settings.load_profile("pagedjax")


MAPS = Path("/proc/self/maps")
MANY_MAPS = 15_000


@pytest.fixture(scope="module", autouse=True)
def few_programs() -> Iterator[None]:
    """Forgets compiled programs behind a file of tests, if they are many.

    Each takes dozens of memory mappings, of which Linux allows a process 65,530; beyond them XLA crashes.
    """
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MANY_MAPS:
        jax.clear_caches()
        gc.collect()


def _skip_without_network(error: DownloadError) -> None:
    if os.environ.get("CI"):
        raise error
    pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real model's GGUF, out of the cache or fetched into it."""
    try:
        with workspace(NAME) as work:
            return fetch_gguf(NAME, KNOWN_MODELS[NAME], work, progress=False)
    except DownloadError as error:
        _skip_without_network(error)
        raise


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_gguf: Path) -> Any:
    """The real model's tokenizer, without its weights."""
    return tokenizer_from_gguf(GGUFFile(smollm2_gguf))


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """The real model in float32 (half a gigabyte), fetched and converted if that has not been done yet."""
    try:
        return load_model(NAME, dtype="float32", progress=False)
    except DownloadError as error:
        _skip_without_network(error)
        raise


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """What `transformers` makes of four chat prompts with the same weights.

    Made once with transformers 5.24.0 and torch 2.13.0 on a CPU: the GGUF's tensors dequantised to float32, q and k
    rows put back, loaded into LlamaForCausalLM with eager attention; `generate` with 64 new tokens, end-of-sequence
    ignored, top-5 log-softmax of the logits of every step; and beam search at several widths.
    """
    return json.loads((Path(__file__).parent / "data" / "golden_smollm2.json").read_text())

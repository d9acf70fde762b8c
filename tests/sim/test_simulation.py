"""What a simulation makes of its configuration: who comes, on which system, and what is said of it."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pagedjax.errors import ConfigError
from pagedjax.sim import Simulation, SimulationConfig

LENGTHS = [(10 + 3 * number, 5 + number) for number in range(100)]


@pytest.fixture(autouse=True)
def statistics(monkeypatch):
    monkeypatch.delenv("PAGEDJAX_DATA", raising=False)


@pytest.fixture
def file(tmp_path):
    """A hundred rows, all different."""
    path = tmp_path / "mine.csv"
    path.write_text("prompt_tokens,output_tokens\n" + "".join(f"{p},{o}\n" for p, o in LENGTHS))
    return str(path)


def come(**config):
    """The lengths of the requests that come at 4 a second in 20 seconds, and their times."""
    simulation = Simulation(SimulationConfig(duration=20.0, **config))
    trace = list(simulation.requests(4.0))
    return [(len(r.prompt_token_ids), r.params.max_tokens) for _, r in trace], [time for time, _ in trace]


def test_the_papers_recipe_takes_the_first_rows_and_shuffles_them(file):
    lengths, times = come(workload=file, seed=3)
    assert 60 < len(lengths) < 100 and times == sorted(times)
    expected = LENGTHS[: len(lengths)]
    assert sorted(lengths) == expected != lengths
    random.Random(3).shuffle(expected)
    assert lengths == expected


@pytest.mark.parametrize("arrivals", ["poisson", "gamma", "constant"])
def test_other_arrivals_draw_any_row(file, arrivals):
    lengths, _ = come(workload=file, arrivals=arrivals)
    assert set(lengths) <= set(LENGTHS) and len(set(lengths)) > 25
    assert max(Counter(lengths).values()) > 1  # with replacement
    assert lengths != come(workload=file, arrivals=arrivals, seed=1)[0]


def test_the_papers_filter_leaves_out_what_fills_the_context(file):
    simulation = Simulation(
        SimulationConfig(workload=file, max_model_len=LENGTHS[50][0] + LENGTHS[50][1], duration=20.0)
    )
    lengths = {len(r.prompt_token_ids) for _, r in simulation.requests(4.0)}
    assert max(lengths) == LENGTHS[49][0]


def test_the_swap_space_is_the_artifacts_20_gib_a_chip():
    assert Simulation(SimulationConfig()).cache.num_host_blocks == (20 << 30) // (16 * 819_200)
    assert Simulation(SimulationConfig(model="opt-66b")).cache.num_host_blocks == 4 * (20 << 30) // (16 * 2_359_296)
    assert Simulation(SimulationConfig(allocator="orca-max")).cache.num_host_blocks == 0


def test_a_static_batch_costs_what_its_longest_costs():
    def padding(batching):
        simulation = Simulation(
            SimulationConfig(batching=batching, allocator="orca-max", max_num_seqs=5, duration=60.0)
        )
        steps = []
        simulation.run(0.5, on_step=steps.append)
        return sum(step.end - step.start for step in steps) / sum(simulation.cost.seconds(step.shape) for step in steps)

    # Beyond what is really computed, which is all that the records tell of.
    assert padding("continuous") == pytest.approx(1.0)
    assert padding("static") > 1.03


def test_overlap_hides_the_host():
    def latency(overlap):
        return Simulation(SimulationConfig(duration=60.0, overlap=overlap)).run(1.0)["normalized_latency_s"]

    assert latency(True) < 0.9 * latency(False)


def test_the_prefix_hit_rate_is_of_the_prompts_tokens(tmp_path):
    rows = [(0, [1, 2, 3]), (50, [1, 2, 9]), (100, [7, 8, 9])]
    path = tmp_path / "trace.jsonl"
    line = '{{"timestamp": {}, "input_length": 1536, "output_length": 4, "hash_ids": {}}}\n'
    path.write_text("".join(line.format(1000 * time, hashes) for time, hashes in rows))
    config = {"workload": str(path), "arrivals": "trace", "enable_prefix_caching": True}
    simulation = Simulation(SimulationConfig(**config))
    assert simulation.run(None)["prefix_hit_rate"] == pytest.approx(1024 / (3 * 1536))
    shrunk = Simulation(SimulationConfig(**config, shrink_prompts=32))
    assert shrunk.run(None)["prefix_hit_rate"] == pytest.approx(32 / (3 * 48)) and not shrunk.notes
    with pytest.raises(ConfigError, match="shrink_prompts=3 is not allowed: .* a divisor of the 512"):
        Simulation(SimulationConfig(**config, shrink_prompts=3))


def test_prompts_and_outputs_are_cut_and_begin_alike(file):
    lengths, _ = come(workload=file, cut_prompts=100, cut_outputs=50, shared_prefix=21, arrivals="constant")
    assert {p for p, _ in lengths} <= {21 + min(p, 100) for p, _ in LENGTHS} and max(lengths)[0] == 121
    assert max(o for _, o in lengths) == 50
    rates = {}
    for prefix in (0, 21):
        config = SimulationConfig(duration=20.0, workload=file, shared_prefix=prefix, enable_prefix_caching=True)
        rates[prefix] = Simulation(config).run(4.0)["prefix_hit_rate"]
    assert rates[0] == 0 and 0.05 < rates[21] < 16 / 31  # one full block of the 21 tokens


def test_the_last_tokens_of_a_prompt_stay_where_it_is_cut(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1000, "output_length": 1, "hash_ids": [5, 6]}\n')
    config = SimulationConfig(workload=str(path), arrivals="trace", cut_prompts=500, cut_outputs=9)
    (timed,) = Simulation(config).requests(None)
    assert timed.request.prompt_token_ids == (5,) * 12 + (6,) * 488 and timed.request.params.max_tokens == 1


def test_a_run_can_end_before_its_requests_have():
    simulation = Simulation(SimulationConfig(duration=60.0, warmup=20.0))
    whole, part = simulation.run(4.0), simulation.run(4.0, until=60.0)
    assert whole["seconds"] > 70 > 61 > part["seconds"] >= 60 and part["requests"] < whole["requests"]
    for name in ("token_states", "mean_batched_requests"):  # of the time that both have
        assert part[name] == pytest.approx(whole[name], rel=0.01)


def test_shared_blocks_are_read_once_where_the_cache_holds_them():
    def run(**more):
        config = SimulationConfig(duration=30.0, workload="alpaca", model="llama-13b", **more)
        return Simulation(config).run(20.0)["seconds"]

    shared = {"shared_prefix": 320, "enable_prefix_caching": True}
    assert run(**shared, reuse_shared=True) < run(**shared) < run(shared_prefix=320)
    assert run(reuse_shared=True) == run()


def test_a_rate_holds_if_the_mean_is_within_the_bound():
    simulation = Simulation(SimulationConfig(duration=60.0))
    for rate in (0.5, 4.0):
        mean = simulation.run(rate)["normalized_latency_s"]
        assert simulation.holds(rate, 1.001 * mean) and not simulation.holds(rate, 0.999 * mean)
        assert simulation.mean_latency(rate, 1.001 * mean) == pytest.approx(mean)
        assert simulation.mean_latency(rate, 0.999 * mean) == float("inf")
    assert Simulation(SimulationConfig(duration=0.01)).holds(0.001, 1.0) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", "x"),
        ("cost_model", 3),
        ("overlap", 2),
        ("rate", "4"),
        ("duration", True),
        ("warmup", -1.0),
        ("cut_prompts", 0),
        ("shared_prefix", -1),
        ("swap_copy_seconds", -1e-6),
    ],
)
def test_a_wrong_value_is_named(field, value):
    with pytest.raises(ConfigError, match=f"^{field}=.* is not allowed: {field} must be "):
        SimulationConfig(**{field: value})

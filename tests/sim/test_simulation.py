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


def test_a_rate_holds_if_the_mean_is_within_the_bound():
    simulation = Simulation(SimulationConfig(duration=60.0))
    for rate in (0.5, 4.0):
        mean = simulation.run(rate)["normalized_latency_s"]
        assert simulation.holds(rate, 1.001 * mean) and not simulation.holds(rate, 0.999 * mean)
    assert Simulation(SimulationConfig(duration=0.01)).holds(0.001, 1.0) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("block_size", "x"), ("cost_model", 3), ("overlap", 2), ("rate", "4"), ("duration", True), ("warmup", -1.0)],
)
def test_a_wrong_value_is_named(field, value):
    with pytest.raises(ConfigError, match=f"^{field}=.* is not allowed: {field} must be "):
        SimulationConfig(**{field: value})

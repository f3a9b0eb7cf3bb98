import json
import subprocess
import sys

import pytest
import torch

from pressroom.benchmarks import loop
from pressroom.benchmarks.speed import SUITES
from pressroom.benchmarks.timing import interleaved, milliseconds, ratio
from pressroom.kernels import compact, mass_of, mass_segments, segment_quotas, segmented_topk


@pytest.mark.parametrize("seed", range(5))
def test_the_loop_chooses_what_the_ops_choose(seed):
    generator = torch.Generator().manual_seed(seed)
    mass = mass_of(torch.rand(2, 3, 400, generator=generator) ** 9)
    scores = torch.randint(0, 30, (2, 3, 400), generator=generator).float()
    limits = {"segment_mass": 0.07, "min_len": 8, "max_len": 50}
    floors = {"n_sink": 4, "n_recent": 20, "min_keep": 3}
    got = loop.select(mass, scores, keep=180, **limits, **floors)
    segments = mass_segments(mass, **limits)
    want = segmented_topk(scores, segments, segment_quotas(segments, keep=180, **floors))
    assert torch.equal(got, want)
    keys = torch.randn(2, 3, 400, 8)
    assert torch.equal(loop.gather(keys, got), compact(keys, keys, want)[0])


@pytest.mark.real_model
@pytest.mark.parametrize("suite", sorted(SUITES))
def test_every_suite_runs(suite):
    command = [sys.executable, "-m", "pressroom.benchmarks", "speed", suite, "--smoke", "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["suite"] == suite
    assert result["threads"] == 1
    for case in result["cases"]:
        assert all(time["median"] > 0 for time in case["milliseconds"].values())
        assert all(found["value"] > 0 for found in case["ratios"].values())


def test_stages_take_turns_and_the_first_round_is_free():
    order = []
    seconds = interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=3)
    assert "".join(order) == "abababab"
    assert [len(times) for times in seconds.values()] == [3, 3]


def test_medians_and_ratios():
    assert milliseconds([0.001, 0.003, 0.002]) == pytest.approx({"median": 2, "low": 1.5, "high": 2.5})
    assert ratio([2, 9, 4], [1, 3, 1]) == 3

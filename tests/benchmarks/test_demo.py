import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from pressroom.benchmarks.plots import held_positions, retention_map, save, wiped_regions
from pressroom.presses.trace import EventRecord, Trace

DEMO = [sys.executable, "-m", "pressroom.benchmarks", "demo"]


def run(*arguments):
    return subprocess.run([*DEMO, *arguments], capture_output=True, text=True, timeout=600)


@pytest.mark.real_model
def test_three_methods_side_by_side(tmp_path):
    done = run(
        "--budget",
        "48",
        "--interval",
        "16",
        "--tokens",
        "66",
        "--prompt",
        "What is 6 times 7?",
        "--output",
        str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    full, tova, ams = result["methods"]
    assert [m["method"] for m in result["methods"]] == ["full_kv", "tova", "ams_tova"]
    length = result["prompt_tokens"]
    assert (full["events"], full["entries"], full["agreement"]) == (0, length + 65, 1.0)
    for method in (tova, ams):
        assert method["events"] >= 3
        assert method["entries"] <= method["peak_entries"] <= 48 + 16
        assert method["bytes"] == 30 * 3 * (48 + 16) * 64 * 2 * 4
        assert 0 < method["agreement"] <= 1
        assert method["kl"] >= 0
    assert full["bytes"] == full["peak_bytes"] == 30 * 3 * (length + 65) * 64 * 2 * 4
    assert all(m["tokens_per_second"] > 0 for m in result["methods"])
    assert imread(result["retention_map"]).std() > 0.1
    again = run(
        "--budget",
        "48",
        "--interval",
        "16",
        "--tokens",
        "66",
        "--prompt",
        "What is 6 times 7?",
        "--output",
        str(tmp_path),
        "--methods",
        "ams_tova",
    )
    (same,) = json.loads(again.stdout.splitlines()[-1])["methods"]
    assert same["text"] == ams["text"]  # a seed is a seed
    assert list(tmp_path.iterdir()) == [tmp_path / "retention.png"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tokens", "100", "--interval", "50"), "error: tokens: got 100, allowed: at least 151 for 3 events"),
        (("--methods", "tovar"), "error: name: got 'tovar'"),
    ],
)
def test_bad_numbers_are_told_in_one_line(arguments, message):
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr.strip().startswith(message)
    assert "Traceback" not in done.stderr


def trace_of(kept, seen):
    kept = torch.tensor(kept)
    return Trace([EventRecord(0, 0, seen, 2, torch.arange(seen).expand(1, 2, -1), kept, kept)])


def test_positions_held_and_regions_wiped_out():
    trace = trace_of([[[0, 1, 9], [0, 5, 9]]], seen=10)
    held = held_positions(trace, layers=2, total=12)
    assert held[0].tolist() == [1, 0.5, 0, 0, 0, 0.5, 0, 0, 0, 1, 1, 1]
    assert (held[1] == 1).all()  # a layer without events holds everything
    # regions of four: head 0 lost 4..7, head 1 nothing
    assert wiped_regions(trace, layers=1, total=12, region=4).tolist() == [0, 0.5, 0]
    assert wiped_regions(trace, layers=2, total=12, region=4).tolist() == [0, 0.25, 0]


def test_pictures_are_written_at_once(tmp_path):
    figure = retention_map({"a": np.eye(8)}, {"a": np.array([0.0, 1.0])}, region=4, prompt=2)
    for name in ("map.png", "map.svg"):
        save(figure, tmp_path / "new" / name)
    assert sorted(file.name for file in (tmp_path / "new").iterdir()) == ["map.png", "map.svg"]

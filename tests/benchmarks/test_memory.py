import json
import subprocess
import sys

import pytest

MEMORY = [sys.executable, "-m", "pressroom.benchmarks", "memory"]


@pytest.mark.real_model
def test_bounded_caches_take_less():
    numbers = ["--budget", "32", "--interval", "16", "--tokens", "40", "--prompt-tokens", "300", "--batch", "2"]
    done = subprocess.run(
        [*MEMORY, *numbers, "--methods", "full_kv,ams_tova"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    full, bounded = result["methods"]
    entry = 30 * 2 * 3 * 64 * 2 * 4  # all layers, both rows
    assert (full["cache_at_end"], full["events"]) == (340 * entry, 0)
    assert (bounded["cache_after_event"], bounded["events"]) == ((32 + 16) * entry, 2)
    for row in result["methods"]:
        assert row["prefill_peak"] > 300 * entry
        assert row["first_token_seconds"] > 0


def test_an_unknown_method_is_told_in_one_line():
    done = subprocess.run([*MEMORY, "--methods", "tovar"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.startswith("error: name: got 'tovar'")

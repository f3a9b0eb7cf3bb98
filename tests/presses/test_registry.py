import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import tiny, token_ids

from pressroom.presses import AMSPress, DecodingPress, TOVAPress, build, names

PLAIN = ["streaming_llm", "random", "random_prompt", "knorm", "usage", "tova", "expected", "keydiff", "snapkv"]
AMS = ["ams_usage", "ams_tova", "ams_expected", "ams_keydiff", "ams_snapkv"]
ABLATIONS = ["global_head", "no_segments", "fixed_segment", "no_credit", "no_mass"]
REQUIRED = ["full_kv", *PLAIN, *AMS, *(f"ablation_{kind}_tova" for kind in ABLATIONS)]


def test_every_method_is_there():
    assert set(REQUIRED) <= set(names())
    assert len(names()) == len(set(names()))


@pytest.mark.parametrize("name", names())
def test_a_method_is_a_fresh_press(name):
    first, second = (build(name, target_size=16, compression_interval=4) for _ in range(2))
    assert first is not second
    if name == "full_kv":
        return
    assert isinstance(first, DecodingPress)
    assert first.base_press is not second.base_press
    assert (first.target_size, first.compression_interval) == (16, 4)


def test_full_kv_does_nothing_and_is_used_alike():
    model, ids = tiny("llama"), token_ids(1, 10)
    press = build("full_kv")
    with press(model), press.record() as trace:
        got = model.generate(ids, max_new_tokens=10, do_sample=False)
    assert torch.equal(got, model.generate(ids, max_new_tokens=10, do_sample=False))
    assert trace.events == []
    assert press.account == []


def test_overrides_reach_the_press_the_wrapper_and_the_scorer():
    press = build("ams_snapkv", target_size=64, window_size=9, compress_prompt=True, kernel_size=3, segment_mass=0.5)
    assert press.compress_prompt
    assert (press.base_press.window_size, press.base_press.segment_mass) == (9, 0.5)
    assert press.base_press.base_press.kernel_size == 3
    assert build("snapkv", target_size=64, window_size=9).base_press.window_size == 9
    assert build("ams_tova", target_size=64, preset="released").base_press.segment_mass == 0.02
    assert build("random_prompt", target_size=64).protect_prompt
    assert not build("random_prompt", target_size=64, protect_prompt=False).protect_prompt


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("global_head", {"segmentation": "none", "n_sink": 0, "always_keep_last": 0, "min_keep_per_segment": 0}),
        ("no_segments", {"segmentation": "none"}),
        ("fixed_segment", {"segmentation": "fixed"}),
        ("no_credit", {"use_credit": False}),
        ("no_mass", {"use_mass_quotas": False}),
    ],
)
def test_an_ablation_is_ams_with_other_fields(kind, expected):
    assert build(f"ablation_{kind}_tova", target_size=64).base_press == AMSPress(TOVAPress(), **expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "tovar", "target_size": 8}, r"^name: got 'tovar', allowed: .*; close: .*tova"),
        ({"name": "", "target_size": 8}, r"^name: got ''"),
        ({"name": None, "target_size": 8}, r"^name: got None"),
        ({"name": "tova"}, r"^target_size: got None, .* tova needs a budget"),
        ({"name": "tova", "target_size": 0}, r"^target_size: got 0, allowed: an integer of at least 1"),
        ({"name": "tova", "target_size": 1.5}, r"^target_size: got 1\.5"),
        ({"name": "tova", "target_size": 8, "compression_interval": 0}, r"^compression_interval: got 0"),
        ({"name": "tova", "target_size": 8, "segment_mass": 0.1}, r"^segment_mass: not a field of tova, allowed: .*"),
        ({"name": "ams_tova", "target_size": 8, "segment_mass": 2}, r"^segment_mass: got 2"),
        ({"name": "ams_tova", "target_size": 8, "preset": "papr"}, r"^preset: got 'papr', allowed: paper \| released"),
    ],
)
def test_errors_name_what_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=message):
        build(**arguments)


def test_presses_from_the_root_of_a_checkout():
    root = Path(__file__).parents[2]
    script = "from presses import AMSPress; import pressroom.presses as p; print(AMSPress is p.AMSPress)"
    out = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=120)
    assert out.stdout.strip() == "True", out.stderr


@pytest.mark.parametrize(
    ("package", "found"), [("transformers", "5.1.2"), ("transformers", "6.0.0"), ("kvpress", "0.5.4")]
)
def test_other_versions_are_named_in_one_line(monkeypatch, package, found):
    from pressroom import presses
    from pressroom.presses import versions

    real = versions.version
    monkeypatch.setattr(versions, "version", lambda name: found if name == package else real(name))
    with pytest.raises(
        ImportError, match=rf"^{package}: got {found}, supported by this version of pressroom: [0-9.]+ and"
    ):
        presses.TOVAPress  # noqa: B018


def test_importing_presses_is_quick():
    script = "import sys, pressroom.presses; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert out.stdout.strip() == "False", out.stderr

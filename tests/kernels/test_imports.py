"""What importing the ops costs, and the name that this folder shares with another package."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = """
from transformers import LlamaConfig, LlamaForCausalLM
LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                             num_attention_heads=1, num_key_value_heads=1))
print("built")
"""


def run(script, cwd, path=""):
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(path)!r})\n{script}" if path else script],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


OPS = ["compaction", "credit", "quotas", "segments", "topk", "usage"]


def test_transformers_is_not_imported(tmp_path):
    imports = "; ".join(f"import pressroom.kernels.{op}" for op in OPS)
    script = f"import sys, pressroom.kernels; {imports}; print([m in sys.modules for m in ('transformers', 'kvpress')])"
    assert run(script, tmp_path) == ["[False,", "False]"]


def test_importing_the_package_alone_costs_no_torch(tmp_path):
    assert run("import sys, pressroom.kernels; print('torch' in sys.modules)", tmp_path) == ["False"]


def test_models_build_from_the_root_of_a_checkout_without_the_other_package():
    """There this folder is what transformers finds under the name of the hub's `kernels` package."""
    assert run(MODEL + "import kernels; print(kernels.__version__)", ROOT) == ["built", "0"]


def test_the_other_package_wins_from_the_root_of_a_checkout(tmp_path):
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '9.8'\ndef get_kernel(*a): return 'theirs'\n")
    script = f"import sys; sys.path.append({str(tmp_path)!r})\n"
    script += "import kernels; print(kernels.__version__, kernels.get_kernel(), kernels.__file__.startswith('/'))"
    assert run(script, ROOT) == ["9.8", "theirs", "True"]


@pytest.mark.parametrize("name", ["compact", "Segments"])
def test_ours_are_not_found_under_the_other_name(name):
    script = f"import kernels\ntry:\n    kernels.{name}\nexcept AttributeError:\n    print('absent')"
    assert run(script, ROOT) == ["absent"]

"""The README: its blocks run, its names exist, its claims name a test."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pressroom.presses import names

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [body for found, body in FENCE.findall(README) if found == language]


@pytest.mark.real_model
def test_python_blocks_run(capsys):
    """In order and in one namespace, as a reader would paste them."""
    namespace: dict = {"__name__": "readme"}
    module = type(sys)("readme")
    sys.modules["readme"] = module  # dataclasses look their module up
    namespace = module.__dict__
    try:
        for number, block in enumerate(blocks("python")):
            exec(compile(block, f"README block {number}", "exec"), namespace)
    finally:
        del sys.modules["readme"]
    assert namespace["event"].kept.shape[-1] == 64
    assert "events=" in capsys.readouterr().out


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^make ([a-z-]+)", "\n".join(blocks("bash")), re.MULTILINE)
    assert {"demo", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def commands() -> list[list[str]]:
    lines = [line.split("#")[0].split() for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line[:2] == ["python", "-m"]]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_commands_exist(command):
    module, subcommand = command[2], command[3]
    done = subprocess.run([sys.executable, "-m", module, subcommand, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_method_table_is_complete():
    table = set(re.findall(r"^\| `([a-z0-9_]+)`", README, re.MULTILINE)) | {"random_prompt"}
    plain = {name for name in names() if not name.startswith(("ams_", "ablation_"))}
    assert plain <= table


def differences() -> list[list[str]]:
    section = README.split("## Differences", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


@pytest.mark.parametrize("row", differences(), ids=lambda row: row[0])
def test_every_difference_names_what_it_is_about_and_a_test(row):
    _, _, _, where, shown = row
    from pressroom import kernels, presses

    for name in re.findall(r"`([\w.]+)`", where):
        owner, *attributes = name.split(".")
        found = getattr(presses, owner, None) or getattr(kernels, owner)
        for attribute in attributes:
            assert attribute in getattr(found, "__dataclass_fields__", {}) or hasattr(found, attribute), name
    assert "::" in shown


def test_every_test_it_names_exists():
    named = set(re.findall(r"`(\w+)::(\w+)`", README))
    assert len(named) > 20
    for file, function in named:
        (path,) = list(ROOT.glob(f"tests/**/{file}.py"))
        defined = {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
        assert function in defined, f"{path}: no {function}"


def test_files_it_links_to_exist():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target

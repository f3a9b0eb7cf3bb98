import json
import statistics
import subprocess
import sys
import time
import types

import pytest
from typer.testing import CliRunner

from pressroom.benchmarks.__main__ import app

COMMAND = [sys.executable, "-m", "pressroom.benchmarks"]


def implementation(monkeypatch, name: str, **attributes) -> None:
    module = types.ModuleType(f"pressroom.benchmarks.{name}")
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_help_imports_nothing_heavy():
    code = (
        "import sys, pressroom.benchmarks.__main__; "
        "sys.exit(', '.join({'torch', 'transformers', 'kvpress', 'numpy', 'matplotlib'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_is_fast():
    def seconds() -> float:
        start = time.perf_counter()
        subprocess.run([*COMMAND, "--help"], check=True, capture_output=True)
        return time.perf_counter() - start

    # 0.2 s on an idle machine; the bound leaves room for a loaded one and is well under what importing torch takes.
    assert statistics.median(seconds() for _ in range(3)) < 1.0


@pytest.mark.parametrize("command", ["demo", "fidelity"])
def test_options_are_forwarded(monkeypatch, command):
    calls = []
    implementation(monkeypatch, command, main=lambda **options: calls.append(options))
    arguments = [command, "--model", "some/model", "--methods", "ams, snapkv", "--budget", "128", "--tokens", "64"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    # What is not given stays out, so that defaults live in the implementation.
    assert calls == [{"model": "some/model", "methods": ["ams", "snapkv"], "budget": 128, "tokens": 64}]


def test_speed_prints_json_last(monkeypatch, tmp_path):
    def suite(smoke: bool, threads: int | None) -> dict:
        return {"smoke": smoke, "threads": threads}

    implementation(monkeypatch, "speed", SUITES={"decode": suite}, print_table=lambda result: print("a table"))
    path = tmp_path / "new" / "speed.json"
    arguments = ["speed", "decode", "--smoke", "--threads", "2", "--json", str(path)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    expected = {"smoke": True, "threads": 2}
    assert result.stdout.splitlines()[0] == "a table"
    assert json.loads(result.stdout.splitlines()[-1]) == expected
    assert json.loads(path.read_text()) == expected


def test_unknown_suite_names_the_known(monkeypatch):
    implementation(monkeypatch, "speed", SUITES={"decode": None, "ops": None}, print_table=print)
    result = CliRunner().invoke(app, ["speed", "nonsense"])
    assert result.exit_code == 2
    assert "decode, ops" in result.output

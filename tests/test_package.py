"""The package as it is installed: every folder and module, the pins, and what CI and the Makefile rely on."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
CODE = ("benchmarks", "kernels", "presses", "training")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def modules() -> list[Path]:
    return [path.relative_to(ROOT) for folder in CODE for path in sorted((ROOT / folder).rglob("*.py"))]


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def test_package_list_is_complete():
    on_disk = {".".join(("pressroom", *path.parent.parts)) for path in modules()}
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(on_disk)


def test_every_package_has_an_init():
    assert {path.parent for path in modules()} == {path.parent for path in modules() if path.name == "__init__.py"}


def test_top_level_holds_no_other_code():
    hidden_or_built = ("build", "dist")
    folders = {path.parts[0] for path in (p.relative_to(ROOT) for p in ROOT.glob("*/**/*.py")) if len(path.parts) > 1}
    assert {f for f in folders if not f.startswith(".") and f not in hidden_or_built} <= {*CODE, "tests"}


def test_wheel_holds_every_module(tmp_path):
    source = tmp_path / "source"
    skip = shutil.ignore_patterns("__pycache__", "results")
    for folder in CODE:
        shutil.copytree(ROOT / folder, source / folder, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    wanted = {f"pressroom/{path.as_posix()}" for path in modules()} | {f"pressroom/{f}/py.typed" for f in CODE}
    assert sorted(wanted - names) == []
    assert "pressroom/__init__.py" not in names  # a namespace
    assert [name for name in names if name.endswith("licenses/LICENSE")]


def test_requirements_match_the_pins():
    project = PROJECT["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    pinned = pins()
    for requirement in map(Requirement, lines):
        if requirement.name != "pressroom":
            assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement


def test_pins_are_public_versions():
    assert [version for version in pins().values() if "+" in version] == []


@pytest.mark.parametrize("target", ["demo", "test", "lint"])
def test_make_target_runs_in_its_own_environment(target):
    command = ["make", "--dry-run", "VENV=.venv-none", "ARGS=--xyz", target]
    plan = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "--constraint constraints.txt" in plan
    assert plan.index(".venv-none/.complete") < plan.rindex(".venv-none/bin/")
    assert ("--xyz" in plan) == (target != "lint")


def test_make_says_when_python_is_too_old(tmp_path):
    old = tmp_path / "bin"
    old.mkdir()
    for name in ("python3.11", "python3.12", "python3.13", "python3"):
        (old / name).write_text("#!/bin/sh\nexit 1\n")
        (old / name).chmod(0o755)
    done = subprocess.run(
        ["make", f"VENV={tmp_path / 'venv'}", "test"],
        cwd=ROOT,
        env={"PATH": f"{old}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "Python 3.11 or later is needed" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_interrupted_environment_is_made_anew(tmp_path):
    """A half-made environment has no stamp: it is removed, and a failing install leaves none either."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "half-made").touch()
    python = tmp_path / "python"  # says it is new enough, then "makes" an environment whose pip fails
    python.write_text(
        '#!/bin/sh\n[ "$1" = -m ] || exit 0\nmkdir -p "$3/bin"\nprintf "#!/bin/sh\\nexit 7\\n" > "$3/bin/python"\n'
        'chmod +x "$3/bin/python"\n'
    )
    python.chmod(0o755)
    command = ["make", f"VENV={venv}", f"PYTHON={python}", "test"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert not (venv / "half-made").exists()
    assert not (venv / ".complete").exists()

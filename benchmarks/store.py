"""Results of a command in one JSON Lines file, each row with what it depends on."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any


class Results:
    """Rows of one JSON Lines file; each addition replaces the whole file at once.

    A row has ``config``, ``versions``, ``status`` (``done`` or ``failed``) and ``figures`` or ``error``. Meant for one
    writer at a time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.versions = versions()
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                try:
                    row = json.loads(line)
                    self.rows.append({key: row[key] for key in ("config", "versions", "status")} | row)
                except (json.JSONDecodeError, KeyError, TypeError):
                    raise ValueError(
                        f"output: {path}, line {number} is no result of this command; pass another --output"
                    ) from None

    def find(self, config: dict) -> dict[str, Any] | None:
        """The row of this configuration and these versions."""
        same = (row for row in self.rows if row["config"] == config and row["versions"] == self.versions)
        return next(same, None)

    def has(self, config: dict) -> bool:
        row = self.find(config)
        return row is not None and row["status"] == "done"

    def add(self, config: dict, status: str, **outcome: Any) -> None:
        old = self.find(config)
        self.rows = [row for row in self.rows if row is not old]
        self.rows.append({"config": config, "versions": self.versions, "status": status, **outcome})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(prefix=".results-", dir=self.path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in self.rows)
            Path(scratch).chmod(0o644)  # mkstemp makes private files
            os.replace(scratch, self.path)
        finally:
            Path(scratch).unlink(missing_ok=True)


def versions() -> dict[str, str]:
    """What a figure depends on besides its configuration; ``code`` is a hash of the sources that make it."""
    root = Path(__file__).resolve().parents[1]
    files = [file for folder in ("presses", "kernels") for file in (root / folder).rglob("*.py")]
    files += [root / "benchmarks" / f"{name}.py" for name in ("metrics", "models", "teacher_forcing")]
    code = hashlib.sha256()
    for file in sorted(files):
        code.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    packages = {name: importlib.metadata.version(name) for name in ("pressroom", "torch", "transformers", "kvpress")}
    return packages | {"python": platform.python_version(), "code": code.hexdigest()[:16]}

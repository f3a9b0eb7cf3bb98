"""Texts that fidelity is measured on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"  # optional, beside a checkout
POSITIONS = 8192  # what the packaged model can hold


@dataclass(frozen=True)
class Text:
    """One text and a name for it in tables."""

    id: str
    text: str


def load_texts(path: str | Path | None = None, *, data: Path = DATA) -> list[Text]:
    """Texts from a file or folder, or the default pair.

    Parameters
    ----------
    path : path, optional
        A ``.txt`` file (one text), a ``.jsonl`` file (objects with ``id`` and ``text``), or a folder of such files.
        Default: a technical text and a finished reasoning trace from ``data``.
    data : Path
        Folder with ``texts.jsonl`` and ``reasoning_traces.jsonl``.

    Raises
    ------
    FileNotFoundError
        If there is nothing to read; the message says what to pass.
    ValueError
        For files that hold something else, no text, or the same id twice.
    """
    if path is None:
        return [technical(data), reasoning(data)]
    path = Path(path)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in (".txt", ".jsonl"))
    elif path.exists():
        files = [path]
    else:
        raise FileNotFoundError(f"texts: {path} does not exist; pass a .txt file, a .jsonl file or a folder of them")
    found = [text for file in files for text in _read(file)]
    if not found:
        raise ValueError(f"texts: {path} holds no text, allowed: a .txt file, a .jsonl file or a folder of them")
    ids = [text.id for text in found]
    if twice := sorted({name for name in ids if ids.count(name) > 1}):
        raise ValueError(f"texts: {path} has {', '.join(twice)} more than once, allowed: distinct ids")
    return found


def technical(data: Path = DATA) -> Text:
    """The first mathematics text of ``texts.jsonl``."""
    for row in _rows(_need(data / "texts.jsonl")):
        if row["kind"] == "mathematics":
            return Text(row["id"], row["text"])
    raise ValueError(f"texts: {data / 'texts.jsonl'} has no row of kind 'mathematics'; pass --texts")


def reasoning(data: Path = DATA) -> Text:
    """The shortest finished DeepSeek-R1 trace of ``reasoning_traces.jsonl``, its problem in front."""
    file = _need(data / "reasoning_traces.jsonl")
    rows = [row for row in _rows(file) if row["model"].startswith("DeepSeek-R1") and row["complete"]]
    row = min(rows, key=lambda row: row["tokens_smollm2"], default=None)
    if row is None or row["tokens_smollm2"] > POSITIONS:
        raise ValueError(f"texts: {file} has no finished DeepSeek-R1 trace within {POSITIONS} tokens; pass --texts")
    return Text(row["id"], f"{row['problem']}\n\n{row['text']}")


def _need(file: Path) -> Path:
    if not file.is_file():
        raise FileNotFoundError(
            f"the default texts need {file}, which is not there; pass --texts with a .txt file, a .jsonl file (one "
            "object with `id` and `text` a line) or a folder of them"
        )
    return file


def _read(file: Path) -> list[Text]:
    if file.suffix == ".txt":
        text = file.read_text(encoding="utf-8")
        return [Text(file.stem, text)] if text.strip() else []
    if file.suffix == ".jsonl":
        return [Text(row["id"], row["text"]) for row in _rows(file)]
    raise ValueError(f"texts: got {file.name}, allowed: .txt or .jsonl")


def _rows(file: Path) -> list[dict]:
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"texts: {file}, line {number}: {error}, allowed: one JSON object a line") from None
        good = isinstance(row, dict) and all(isinstance(row.get(key), str) for key in ("id", "text"))
        if not good or not row["text"].strip():
            raise ValueError(f"texts: {file}, line {number}: allowed: an object with strings `id` and `text`")
        rows.append(row)
    return rows

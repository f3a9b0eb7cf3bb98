"""The versions whose cache and mask interfaces the presses are built on."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

SUPPORTED = {"transformers": ((5, 2), (5, 3)), "kvpress": ((0, 5, 5), (0, 5, 6))}  # from, below


def check_versions() -> None:
    """Raise ``ImportError`` that names what is installed and what is supported, unless they agree."""
    for package, (lowest, below) in SUPPORTED.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            found = "none"
        numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
        if not lowest <= numbers < below:
            span = " and below ".join(".".join(map(str, bound)) for bound in (lowest, below))
            raise ImportError(f"{package}: got {found}, supported by this version of pressroom: {span}")

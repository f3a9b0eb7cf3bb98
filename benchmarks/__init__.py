"""Benchmarks and the demo. Empty on purpose: `python -m pressroom.benchmarks --help` must not import torch."""

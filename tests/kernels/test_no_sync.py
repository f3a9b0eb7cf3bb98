"""A whole event on tensors that have shapes and no values: any host read raises."""

import pytest
import torch

from pressroom.kernels import (
    compact,
    fixed_segments,
    mass_of,
    mass_segments,
    mix_credit,
    segment_quotas,
    segmented_topk,
    single_segment,
    top_indices,
    window_attention,
    window_usage,
)


@pytest.mark.parametrize("padded", [False, True])
def test_an_event_never_waits_for_the_device(padded):
    queries = torch.empty(2, 6, 16, 32, device="meta")
    storage = tuple(torch.empty(2, 3, 600, 32, device="meta") for _ in range(2))
    keys, values = (x[:, :, :512] for x in storage)
    start = torch.empty(2, dtype=torch.int64, device="meta") if padded else None
    usage = window_usage(queries, keys, start=start, available=start)
    mass, credit = mix_credit(usage, torch.empty(2, 3, 256, device="meta"), decay=0.9, mix=0.9, start=start)
    scores = window_attention(queries, keys, start=start).unflatten(1, (3, 2)).mean(dim=2)
    for segments in (
        mass_segments(mass, segment_mass=0.1, min_len=16, max_len=64, start=start),
        fixed_segments(mass, length=64, start=start),
        single_segment(mass_of(usage, start=start), start=start),
    ):
        quotas = segment_quotas(segments, keep=256, n_sink=4, n_recent=32, min_keep=1, start=start)
        indices = segmented_topk(scores, segments, quotas, start)
        assert indices.shape == (2, 3, 256)
        assert indices.device.type == "meta"
    kept, _ = compact(keys, values, indices, out=storage)
    assert kept.shape == (2, 3, 256, 32)
    assert compact(keys, values, top_indices(scores, keep=9, start=start))[1].shape == (2, 3, 9, 32)
    assert credit.gather(-1, indices).shape == (2, 3, 256)


def test_the_check_does_catch_a_host_read():
    with pytest.raises(RuntimeError, match="meta"):
        torch.empty(3, device="meta").sum().item()

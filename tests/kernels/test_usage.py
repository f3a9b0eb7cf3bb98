import pytest
import torch
from oracles import ams

from pressroom.kernels import attention_sums, window_attention, window_usage
from pressroom.kernels.usage import reference


def states(batch, heads, group, window, entries, dim, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(batch, heads * group, window, dim, generator=generator, dtype=torch.float64)
    keys = torch.randn(batch, heads, entries, dim, generator=generator, dtype=torch.float64)
    return (2 * queries).to(dtype), keys.to(dtype)


def expected(queries, keys, kernel_size, scaling, suffix, n_sink, start=None, available=None):
    batch, heads, entries, _ = keys.shape
    grouped = queries.double().unflatten(1, (heads, -1))
    out = torch.empty(batch, heads, entries, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            row = ams.usage(
                grouped[b, h],
                keys[b, h].double(),
                kernel_size=kernel_size,
                scaling=scaling,
                suffix=suffix,
                n_sink=n_sink,
                pad=0 if start is None else int(start[b]),
                available=None if available is None else int(available[b]),
            )
            out[b, h] = torch.tensor(row, dtype=torch.float64)
    return out


@pytest.mark.parametrize("suffix", ["max", "observed", "max_no_sink"])
@pytest.mark.parametrize(
    ("group", "window", "entries", "dim", "kernel_size"),
    [(1, 1, 2, 60, 1), (3, 5, 63, 64, 5), (7, 9, 40, 16, 3), (2, 30, 20, 8, 7), (1, 4, 1, 8, 5), (2, 16, 90, 128, 5)],
)
def test_against_the_oracle(group, window, entries, dim, kernel_size, suffix):
    queries, keys = states(2, 2, group, window, entries, dim)
    got = window_usage(queries, keys, kernel_size=kernel_size, suffix=suffix, n_sink=3)
    torch.testing.assert_close(
        got.double(), expected(queries, keys, kernel_size, dim**-0.5, suffix, 3), atol=1e-6, rtol=1e-4
    )


@pytest.mark.parametrize("suffix", ["max", "observed", "max_no_sink"])
@pytest.mark.parametrize("starts", [[0, 3, 20], [21, 22, 0], [1, 1, 1]])
def test_padding_and_fewer_queries(starts, suffix):
    queries, keys = states(3, 2, 2, 6, 23, 16)
    start, available = torch.tensor(starts), torch.tensor([6, 2, 40])
    keys[1, :, : starts[1]] = torch.nan  # what padding holds is nobody's business
    settings = {"kernel_size": 3, "suffix": suffix, "n_sink": 2}
    got = window_usage(queries, keys.nan_to_num(1e4), start=start, available=available, **settings)
    clean = keys.nan_to_num(0.0)
    want = expected(queries, clean, 3, 0.25, suffix, 2, start, available)
    torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=1e-4)
    for row, first in enumerate(starts):  # the row alone, bit for bit in its indices
        last = min(6, int(available[row]))
        alone = window_usage(queries[row : row + 1, :, 6 - last :], clean[row : row + 1, :, first:], **settings)
        torch.testing.assert_close(got[row, :, first:], alone[0], atol=1e-6, rtol=1e-4)
        assert (got[row, :, :first] == 0).all()


def test_attention_is_the_mean_per_query_head():
    queries, keys = states(2, 2, 3, 5, 12, 16)
    got = window_attention(queries, keys, scaling=0.5)
    logits = 0.5 * queries.double() @ keys.double().repeat_interleave(3, dim=1).transpose(2, 3)
    mask = torch.ones(5, 12, dtype=torch.bool).tril(7)
    want = logits.masked_fill(~mask, -torch.inf).softmax(dim=-1).mean(dim=2)
    torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(got.sum(dim=-1), torch.ones(2, 6))


@pytest.mark.parametrize("block", [1, 700, 1 << 22])
@pytest.mark.parametrize("count", [1, 5, 12])
def test_sums_are_those_of_each_query(block, count, monkeypatch):
    """Padding per row and per KV head; a query at a padding entry counts nothing."""
    monkeypatch.setattr(reference, "BLOCK", block)
    queries, keys = states(2, 2, 3, count, 12, 16)
    starts = torch.tensor([[0, 2], [9, 11]])
    got = attention_sums(queries, keys, scaling=0.5, start=starts)
    for row in range(2):
        for head in range(6):
            first = int(starts[row, head // 3])
            want = torch.zeros(12, dtype=torch.float64)
            for j in range(count):
                own = 12 - count + j
                if own >= first:
                    logits = 0.5 * keys[row, head // 3, first : own + 1].double() @ queries[row, head, j].double()
                    want[first : own + 1] += logits.softmax(dim=0)
            torch.testing.assert_close(got[row, head].double(), want, atol=1e-5, rtol=1e-4)
    alone = attention_sums(queries[:1], keys[:1], scaling=0.5, start=torch.tensor([3]))
    torch.testing.assert_close(alone[:, :, 3:], attention_sums(queries[:1, :, -9:], keys[:1, :, 3:], scaling=0.5))


def test_sums_take_no_more_queries_than_entries():
    queries, keys = states(1, 1, 1, 5, 4, 8)
    with pytest.raises(ValueError, match=r"^queries.shape: got \(1, 1, 5, 8\), allowed: at most 4 queries"):
        attention_sums(queries, keys)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_input_is_computed_in_fp32(dtype):
    queries, keys = states(1, 2, 2, 8, 100, 64, dtype=dtype)
    want = expected(queries, keys, 5, 0.125, "max", 4)
    got = window_usage(queries, keys, kernel_size=5)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=1e-4)


def test_strides_do_not_matter():
    queries, keys = states(2, 2, 2, 6, 30, 16)
    want = window_usage(queries, keys)
    storage = torch.randn(2, 2, 50, 16)
    storage[:, :, :30] = keys
    got = window_usage(queries.transpose(1, 2).contiguous().transpose(1, 2), storage[:, :, :30])
    assert torch.equal(got, want)
    assert torch.equal(storage[:, :, :30], keys)


def test_huge_logits_stay_finite():
    queries, keys = states(1, 1, 2, 8, 50, 16)
    got = window_usage(queries * 1e4, keys * 1e4)
    assert got.isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel_size": 4}, "kernel_size: got 4, allowed: an odd integer"),
        ({"kernel_size": 0}, "kernel_size: got 0"),
        ({"suffix": "min"}, "suffix: got 'min', allowed: max | observed | max_no_sink"),
        ({"n_sink": -1}, "n_sink: got -1"),
        ({"queries": torch.ones(1, 3, 2, 8)}, "queries.shape: got (1, 3, 2, 8), allowed: (1, a multiple of 2, W, 8)"),
        ({"queries": torch.ones(1, 2, 2, 4)}, "queries.shape: got"),
        ({"keys": torch.ones(2, 5, 8)}, "keys.shape: got (2, 5, 8)"),
        ({"keys": torch.ones(1, 2, 0, 8)}, "keys.shape: got"),
        ({"start": torch.zeros(2)}, "start.shape: got (2,)"),
        ({"available": torch.zeros(3)}, "available.shape: got (3,)"),
    ],
)
def test_bad_input(change, message):
    arguments = {"queries": torch.ones(1, 4, 2, 8), "keys": torch.ones(1, 2, 5, 8), **change}
    with pytest.raises(ValueError) as error:
        window_usage(arguments.pop("queries"), arguments.pop("keys"), **arguments)
    assert str(error.value).startswith(message)

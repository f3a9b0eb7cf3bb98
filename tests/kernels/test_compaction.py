import pytest
import torch

from pressroom.kernels import compact


def some(batch, heads, entries, dims, dtype=torch.float32):
    keys, values = (torch.randn(batch, heads, entries, dim).to(dtype) for dim in dims)
    return keys, values


def ascending(batch, heads, entries, keep, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(batch, heads, entries, generator=generator).topk(keep, dim=-1).indices.sort(dim=-1).values


SHAPES = [(1, 1, 1, 1), (2, 3, 63, 1), (2, 3, 63, 63), (1, 4, 500, 300), (3, 2, 1024, 129), (2, 1, 300, 128)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dims", [(64, 64), (60, 128)])
@pytest.mark.parametrize("shape", SHAPES)
def test_to_new_tensors(shape, dims, dtype):
    batch, heads, entries, keep = shape
    keys, values = some(batch, heads, entries, dims, dtype)
    indices = ascending(batch, heads, entries, keep)
    got = compact(keys, values, indices)
    for out, states in zip(got, (keys, values), strict=True):
        assert torch.equal(out, states.gather(2, indices[..., None].expand(-1, -1, -1, states.shape[-1])))


@pytest.mark.parametrize("spare", [0, 7])
@pytest.mark.parametrize("shape", SHAPES)
def test_in_place(shape, spare):
    batch, heads, entries, keep = shape
    storage = some(batch, heads, entries + spare, (64, 48))
    before = [x.clone() for x in storage]
    keys, values = (x[:, :, :entries] for x in storage)
    indices = ascending(batch, heads, entries, keep)
    got = compact(keys, values, indices, out=storage)
    for out, store, old in zip(got, storage, before, strict=True):
        assert torch.equal(out, old.gather(2, indices[..., None].expand(-1, -1, -1, old.shape[-1])))
        assert out.data_ptr() == store.data_ptr()
        assert torch.equal(store[:, :, keep:], old[:, :, keep:])  # nothing behind is touched


def test_to_other_storage():
    keys, values = some(2, 2, 40, (16, 16))
    indices = ascending(2, 2, 40, 20)
    storage = tuple(torch.full((2, 2, 30, 16), torch.nan) for _ in range(2))
    got = compact(keys, values, indices, out=storage)
    want = compact(keys, values, indices)
    for a, b, store in zip(got, want, storage, strict=True):
        assert torch.equal(a, b)
        assert store[:, :, 20:].isnan().all()


@pytest.mark.parametrize("lead", [(), (3,), (2, 3, 2)])
def test_rows_of_any_shape(lead):
    keys, values = torch.randn(*lead, 20, 8), torch.randn(*lead, 20, 8)
    indices = torch.rand(*lead, 20).topk(7, dim=-1).indices.sort(dim=-1).values
    got, _ = compact(keys, values, indices)
    assert torch.equal(got, keys.gather(-2, indices[..., None].expand(*lead, 7, 8)))


def test_strides_do_not_matter():
    keys, values = some(2, 3, 20, (8, 8))
    indices = ascending(2, 3, 20, 9)
    want = compact(keys, values, indices)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (keys, values)]
    every_second = [torch.randn(2, 3, 40, 8) for _ in range(2)]
    for x, source in zip(every_second, (keys, values), strict=True):
        x[:, :, ::2] = source
    for states in (turned, [x[:, :, ::2] for x in every_second]):
        for a, b in zip(compact(*states, indices), want, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": torch.ones(2, 3, 9, 4)}, "values.shape: got (2, 3, 9, 4)"),
        ({"indices": torch.zeros(2, 2, 5, dtype=torch.int64)}, "indices.shape: got (2, 2, 5)"),
        ({"out": (torch.ones(2, 3, 4, 8), torch.ones(2, 3, 10, 4))}, "out[0].shape: got (2, 3, 4, 8)"),
        ({"out": (torch.ones(2, 3, 10, 8), torch.ones(2, 3, 10, 8))}, "out[1].shape: got (2, 3, 10, 8)"),
    ],
)
def test_bad_input(change, message):
    arguments = {"keys": torch.ones(2, 3, 10, 8), "values": torch.ones(2, 3, 10, 4)}
    arguments |= {"indices": torch.zeros(2, 3, 5, dtype=torch.int64), **change}
    with pytest.raises(ValueError) as error:
        compact(**arguments)
    assert str(error.value).startswith(message)

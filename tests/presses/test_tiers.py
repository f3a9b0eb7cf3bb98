"""The two-tier store: what comes back is what was appended, and a failure leaves it as it was."""

import copy
import io
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pressroom.presses.tiers import HostMemoryError, TieredStore, analytic_saving

B, H, DK, DV = 2, 3, 8, 5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOKEN = B * H * (DK + DV) * 4  # bytes of one fp32 token of the batch

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]


def states(tokens, *, batch=B, dtype=torch.float32, device="cpu"):
    return tuple(torch.randn(batch, H, tokens, size).to(dtype).to(device) for size in (DK, DV))


def filled(*sizes, layers=1, device="cpu", **options):
    """A store, and per layer the keys and values it holds."""
    store = TieredStore(layers, device=device, **{"chunk_size": 4, **options})
    parts = [[states(size, device=device) for size in sizes] for _ in range(layers)]
    for layer, chunks in enumerate(parts):
        for keys, values in chunks:
            store.append(layer, keys, values)
    return store, [tuple(torch.cat(x, dim=2) for x in zip(*chunks, strict=True)) for chunks in parts]


def literal(full, indices):
    """Entries (B, H, n, D) at ``indices`` (B, n) of keys and values (B, H, T, D), row by row."""
    return tuple(torch.stack([x[row][:, i.to(x.device)] for row, i in enumerate(indices)]) for x in full)


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert a.device == b.device
        assert torch.equal(a, b)


def pointers(store):
    return [[chunk.data_ptr() for chunk in chunks] for host in store._layers for chunks in host.chunks]


def everything(store, layer=0):
    return store.fetch(layer, torch.arange(store.length(layer)))


# -- what comes back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_fetched_is_what_was_appended(device, dtype, data):
    batch = data.draw(st.integers(1, 3), "batch")
    store = TieredStore(1, device=device, chunk_size=data.draw(st.integers(1, 7), "chunk size"))
    parts = []
    for size in data.draw(st.lists(st.integers(1, 16), min_size=1, max_size=8), "appended"):
        new = states(size, batch=batch, dtype=dtype, device=device)
        store.append(0, *new)
        parts.append([x.clone() for x in new])
        for x in new:
            x.fill_(float("nan"))  # the caller may write to its own memory at once
        full = tuple(torch.cat(x, dim=2) for x in zip(*parts, strict=True))
        length = full[0].shape[2]
        assert store.length(0) == length
        n = data.draw(st.integers(0, length + 2), "fetched")
        row = st.lists(st.integers(0, length - 1), min_size=n, max_size=n).map(sorted)
        rows = data.draw(st.lists(row, min_size=batch, max_size=batch), "indices")
        indices = torch.tensor(rows, dtype=torch.int64).view(batch, n)
        if data.draw(st.booleans(), "ahead"):
            store.prefetch(0, indices)
        assert_same(store.fetch(0, indices), literal(full, indices))
        assert_same(store.fetch(0, indices[0]), literal(full, indices[:1].expand(batch, -1)))


def test_shorter_rows_are_padded_in_front():
    store, [full] = filled(10)
    got = store.fetch(0, torch.tensor([[0, 0, 7], [2, 5, 9]]))
    assert torch.equal(got[0][0, :, 2], full[0][0, :, 7])
    assert torch.equal(got[1][1], full[1][1][:, [2, 5, 9]])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ahead", [False, True])
def test_out_is_filled_in_place_whatever_its_strides(device, ahead):
    store, [full] = filled(9, device=device)
    indices = torch.tensor([[0, 3, 8], [1, 2, 3]])
    room = [torch.zeros(B, H, 6, size, device=device) for size in (DK, DV)]
    out = (room[0][:, :, 2:5], room[1][:, :, 2:5])
    if ahead:
        store.prefetch(0, indices)
    got = store.fetch(0, indices, out=out)
    assert got[0] is out[0]
    assert_same(out, literal(full, indices))
    assert all(not x[:, :, :2].any() and not x[:, :, 5:].any() for x in room)


def test_what_was_fetched_stays_when_buffers_are_used_again():
    store, [full] = filled(1, 1, 1)
    first = [store.fetch(0, torch.tensor([i])) for i in range(3)]
    for i, got in enumerate(first):
        assert_same(got, literal(full, torch.full((B, 1), i)))


@pytest.mark.parametrize("device", DEVICES)
def test_a_prefetch_serves_its_own_indices_only(device):
    store, [full, other] = filled(9, 3, layers=2, device=device)
    a, b = torch.tensor([0, 4, 8]).expand(B, -1), torch.tensor([1, 2, 3]).expand(B, -1)
    store.prefetch(0, a)
    store.prefetch(1, b)
    assert_same(store.fetch(0, b), literal(full, b))
    assert_same(store.fetch(0, a), literal(full, a))
    assert_same(store.fetch(1, b), literal(other, b))
    store.prefetch(0, a)
    store.append(0, *states(2, device=device))
    assert_same(store.fetch(0, a), literal(full, a))


@pytest.mark.parametrize("device", DEVICES)
def test_states_of_any_mode_and_layout(device):
    store = TieredStore(1, device=device, chunk_size=2)
    parts = [states(3, device=device) for _ in range(3)]
    with torch.inference_mode():
        store.append(0, *(x.clone() for x in parts[0]))
        store = copy.deepcopy(store)
        everything(store)
    store.append(0, *(x.clone().requires_grad_() for x in parts[1]))
    store.append(0, *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in parts[2]))
    got = everything(store)
    assert not got[0].requires_grad
    assert not got[0].is_inference()
    assert_same(got, [torch.cat(x, dim=2) for x in zip(*parts, strict=True)])


# -- what the host holds -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_growth_never_moves_a_chunk(device):
    store, _ = filled(3, device=device)
    seen = pointers(store)
    for size in [1, 1, 9, 1, 4]:
        store.append(0, *states(size, device=device))
        grown = pointers(store)
        assert all(new[: len(old)] == old for new, old in zip(grown, seen, strict=True))
        assert all(len(chunks) == -(-store.length(0) // 4) for chunks in grown)
        seen = grown


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_host_memory_is_pinned():
    store, _ = filled(9, device="cuda")
    for kept in (store, copy.deepcopy(store)):
        assert all(chunk.is_pinned() for chunks in kept._lists() for chunk in chunks)


@pytest.mark.parametrize("device", DEVICES)
def test_counters_are_exact(device):
    store, _ = filled(6, 1, layers=2, device=device)
    assert store.used_host_bytes() == 2 * 7 * TOKEN
    assert store.host_bytes() == 2 * 8 * TOKEN
    assert store.traffic.bytes_down == 2 * 7 * TOKEN
    assert store.traffic.bytes_up == 0
    store.fetch(0, torch.tensor([[0, 0, 1], [2, 3, 4]]))
    assert store.traffic.bytes_up == 3 * TOKEN
    store.prefetch(1, torch.tensor([5]))
    store.fetch(1, torch.tensor([5]))
    store.fetch(1, torch.empty(0, dtype=torch.int64))
    assert store.traffic.bytes_up == 4 * TOKEN
    assert store.traffic.bytes_down == 2 * 7 * TOKEN
    assert device != "cpu" or store.traffic.waits == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", [0, 1, 4, 6, 9, 20])
def test_truncation_takes_back_a_forward_that_reached_some_layers(device, length):
    store, full = filled(6, 3, layers=2, device=device)
    ahead = states(1, device=device)
    store.append(0, *ahead)
    full[0] = tuple(torch.cat(x, dim=2) for x in zip(full[0], ahead, strict=True))
    store.prefetch(0, torch.arange(10))
    store.truncate(length)
    kept = [min(length, 10), min(length, 9)]
    assert [store.length(layer) for layer in range(2)] == kept
    assert store.used_host_bytes() == sum(kept) * TOKEN
    assert store.host_bytes() == sum(-(-n // 4) * 4 * TOKEN for n in kept)
    with pytest.raises(ValueError, match="indices" if length else "layer"):
        store.fetch(0, torch.arange(kept[0] + 1))
    for layer, n in enumerate(kept):
        new = states(2, device=device)
        store.append(layer, *new)
        assert_same(
            everything(store, layer),
            [torch.cat([x[:, :, :n], y], dim=2) for x, y in zip(full[layer], new, strict=True)],
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", [[1, 0], [0, 0], [0, 1], [1], [0, 0, 1, 1, 1]])
def test_reorder_selects_rows(device, index):
    store, full = filled(6, 3, layers=2, device=device)
    store.prefetch(0, torch.arange(9))
    store.reorder(torch.tensor(index, device=device))
    new = states(1, batch=len(index), device=device)
    for layer in range(2):
        store.append(layer, *new)
        expected = [torch.cat([x[index], y], dim=2) for x, y in zip(full[layer], new, strict=True)]
        assert_same(everything(store, layer), expected)
    assert store.used_host_bytes() == 2 * 10 * TOKEN // B * len(index)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, "save"])
def test_copies_share_nothing(device, how):
    store, [full] = filled(6, 3, device=device, max_host_bytes=10**6)
    store.prefetch(0, torch.arange(2))
    if how == "save":
        file = io.BytesIO()
        torch.save(store, file)
        other = torch.load(io.BytesIO(file.getvalue()))
    else:
        other = how(store)
    assert other.traffic == store.traffic
    assert other.traffic is not store.traffic
    assert (other.device, other.chunk_size, other.max_host_bytes) == (store.device, 4, 10**6)
    new = [states(2, device=device) for _ in range(2)]
    for kept, more in zip((store, other), new, strict=True):
        kept.append(0, *more)
    for kept, more in zip((store, other), new, strict=True):
        assert_same(everything(kept), [torch.cat(x, dim=2) for x in zip(full, more, strict=True)])


@pytest.mark.parametrize("device", DEVICES)
def test_free_releases_everything(device):
    store, _ = filled(6, device=device)
    everything(store)
    moved = store.traffic.bytes_up
    store.free()
    assert (store.length(0), store.host_bytes(), store.used_host_bytes(), store.traffic.bytes_up) == (0, 0, 0, moved)
    assert all(buffer is None for buffer, _ in store._staging)
    new = states(3, batch=5, dtype=torch.float16, device=device)  # any other sequence
    store.append(0, *new)
    assert_same(everything(store), new)


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_the_host_limit_stops_growth_and_nothing_else(device):
    store, [full] = filled(3, device=device, max_host_bytes=4 * TOKEN)
    with pytest.raises(HostMemoryError, match=rf"asked for {4 * TOKEN} .* held {4 * TOKEN} .* limit {4 * TOKEN} "):
        store.append(0, *states(2, device=device))
    assert (store.length(0), store.host_bytes(), store.traffic.bytes_down) == (3, 4 * TOKEN, 3 * TOKEN)
    assert_same(everything(store), full)
    with pytest.raises(HostMemoryError):
        store.reorder(torch.tensor([0, 0, 1]))
    assert_same(everything(store), full)
    store.reorder(torch.tensor([1, 0]))
    new = states(1, device=device)
    store.append(0, *new)
    assert_same(everything(store), [torch.cat([x[[1, 0]], y], dim=2) for x, y in zip(full, new, strict=True)])


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_a_failed_allocation_leaves_the_store_as_it_was(monkeypatch, error):
    store, [full, _] = filled(3, layers=2)
    before, allowed, empty = pointers(store), [0], torch.empty

    def failing(*args, **kwargs):
        if not allowed[0]:
            raise error("can't allocate memory")
        allowed[0] -= 1
        return empty(*args, **kwargs)

    new = states(6)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", failing)
        for successes in range(4):  # two chunks each for keys and values
            allowed[0] = successes
            with pytest.raises(HostMemoryError, match=rf"asked for {8 * TOKEN} .* held {8 * TOKEN} .* limit None"):
                store.append(0, *new)
            assert (store.length(0), store.traffic.bytes_down, pointers(store)) == (3, 6 * TOKEN, before)
        for call in (
            lambda: everything(store),
            lambda: store.reorder(torch.tensor([1, 0])),
            lambda: store.reorder(torch.tensor([1])),
        ):
            allowed[0] = 0
            with pytest.raises(HostMemoryError):
                call()
    assert_same(everything(store), full)
    store.append(0, *new)
    assert_same(everything(store), [torch.cat(x, dim=2) for x in zip(full, new, strict=True)])


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("layers", lambda s: TieredStore(0, device="cpu")),
        ("chunk_size", lambda s: TieredStore(1, device="cpu", chunk_size=0)),
        ("max_host_bytes", lambda s: TieredStore(1, device="cpu", max_host_bytes=-1)),
        ("layer", lambda s: s.append(2, *states(1))),
        ("layer", lambda s: s.length(-1)),
        ("layer", lambda s: s.fetch(1, torch.tensor([0]))),  # nothing there
        ("keys", lambda s: s.append(0, *states(0))),
        ("keys", lambda s: s.append(0, *states(1, batch=3))),
        ("keys", lambda s: s.append(1, *states(1, batch=3))),
        ("keys", lambda s: s.append(0, *states(1, dtype=torch.float16))),
        ("keys", lambda s: s.append(0, *states(1)[::-1])),
        ("keys", lambda s: s.append(0, *(x[0] for x in states(1)))),
        ("keys", lambda s: s.append(0, *(x[:, :1] for x in states(1)))),
        ("keys", lambda s: s.append(0, *(x.to("meta") for x in states(1)))),
        ("values", lambda s: s.append(0, states(2)[0], states(1)[1])),
        ("indices", lambda s: s.fetch(0, torch.tensor([5]))),
        ("indices", lambda s: s.fetch(0, torch.tensor([[0, 1], [-1, 1]]))),
        ("indices", lambda s: s.fetch(0, torch.tensor([[0, 1], [2, 1]]))),
        ("indices", lambda s: s.prefetch(0, torch.tensor([2, 1]))),
        ("indices", lambda s: s.fetch(0, torch.tensor(0))),
        ("indices", lambda s: s.fetch(0, torch.tensor([0], dtype=torch.int32))),
        ("indices", lambda s: s.fetch(0, torch.zeros(3, 1, dtype=torch.int64))),
        ("out", lambda s: s.fetch(0, torch.tensor([0]), out=states(2))),
        ("out", lambda s: s.fetch(0, torch.tensor([0]), out=states(1, dtype=torch.float16))),
        ("length", lambda s: s.truncate(-1)),
        ("index", lambda s: s.reorder(torch.tensor([0, 2]))),
        ("index", lambda s: s.reorder(torch.tensor([-1]))),
        ("index", lambda s: s.reorder(torch.empty(0, dtype=torch.int64))),
    ],
)
def test_wrong_arguments_are_named(field, call):
    store, full = TieredStore(2, device="cpu", chunk_size=4), states(5)
    store.append(0, *full)
    with pytest.raises(ValueError, match=rf"^{field}: got .*, allowed: "):
        call(store)
    assert_same(everything(store), full)


# -- the order of copies on CUDA, played without one -------------------------------------------------------------------


class Stream:
    """Work that is done only when somebody waits for it, in order."""

    def __init__(self, device=None):
        self.work = []

    def record_event(self):
        return Event(self, len(self.work))

    def wait_stream(self, other):
        pass

    def wait_event(self, event):
        event.synchronize()


class Event:
    def __init__(self, stream, position):
        self.stream, self.position = stream, position

    def query(self):
        return all(done for done, _ in self.stream.work[: self.position])

    def synchronize(self):
        for number, (done, action) in enumerate(self.stream.work[: self.position]):
            if not done:
                action()
                self.stream.work[number] = True, None


@pytest.fixture
def lazy_cuda(monkeypatch):
    """A store on the CPU that takes the CUDA path, with streams that do their copies as late as allowed."""
    main, entered = Stream(), []

    class Inside(nullcontext):
        def __enter__(self):
            entered.append(self.enter_result)

        def __exit__(self, *_):
            entered.pop()

    copy_, empty = torch.Tensor.copy_, torch.empty

    def late(self, source, non_blocking=False):
        if not entered:
            return copy_(self, source, non_blocking)
        entered[-1].work.append((False, lambda: copy_(self, source)))
        return self

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", Inside)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: entered[-1] if entered else main)
    monkeypatch.setattr(torch.Tensor, "copy_", late)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs))
    store = TieredStore(3, device="cpu", chunk_size=4)
    store._cuda, store._streams = True, [Stream(), Stream()]
    return store


def test_every_read_waits_for_its_copy(lazy_cuda):
    store, full = lazy_cuda, []
    for layer in range(3):
        new = states(9)
        full.append([x.clone() for x in new])
        store.append(layer, *new)
        for x in new:
            x.zero_()
    indices = torch.tensor([0, 3, 5, 8]).expand(B, -1)
    for layer in range(3):  # more copies in flight than staging buffers
        store.prefetch(layer, indices)
    assert store.traffic.waits == 3
    for layer in range(3):
        assert_same(store.fetch(layer, indices), literal(full[layer], indices))
    # the staging buffers of the first layer served the third one, so its copy was over
    assert store.traffic.waits == 5
    assert store.traffic.bytes_up == 3 * 4 * TOKEN

    store.prefetch(0, indices)
    assert_same(store.fetch(0, indices + 0), literal(full[0], indices))
    store.prefetch(0, indices)
    other = torch.tensor([1, 2, 3, 4]).expand(B, -1)  # as many, but not those
    assert_same(store.fetch(0, other), literal(full[0], other))

    new = states(1)
    store.append(0, *new)
    store.prefetch(1, indices)
    store.reorder(torch.tensor([1, 0]))  # the last write has landed, what was fetched ahead is void
    assert_same(everything(store), [torch.cat([x, y], dim=2)[[1, 0]] for x, y in zip(full[0], new, strict=True)])
    assert_same(store.fetch(1, indices), [x[[1, 0]] for x in literal(full[1], indices)])

    store.append(2, *new)
    expected = [torch.cat([x[[1, 0]], y], dim=2) for x, y in zip(full[2], new, strict=True)]
    assert_same([torch.cat(x)[:10].permute(1, 2, 0, 3) for x in store.__getstate__()["_layers"][2].chunks], expected)


# -- the formula -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("generated", "voted", "saving"), [(16384, 80, 5.48), (32768, 160, 7.11)])
def test_the_paper_s_examples(generated, voted, saving):
    got = analytic_saving(512, generated, consensus=2, detail_length=250, voted=voted, summary_length=20, window=512)
    assert round(got, 2) == saving


def test_the_formula_at_its_edges():
    assert analytic_saving(100, 300, 2, 250, 0, 20, 100) == 2.0  # no summary yet: prompt and window
    assert analytic_saving(100, 300, 2, 250, 1, 20, 50) == 1.0  # the only summary is read in detail
    with pytest.raises(ValueError, match="window"):
        analytic_saving(100, 300, 2, 250, 1, 20, -1)
    with pytest.raises(ValueError, match="active"):
        analytic_saving(0, 300, 2, 250, 0, 20, 0)

import copy
import gc
import math
import pickle

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from oracles import segments as oracle
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pressroom.benchmarks.models import packaged
from pressroom.presses import segments
from pressroom.presses.segments import (
    BEGIN_MARKER,
    BOUNDARIES,
    END_MARKER,
    Segment,
    SegmentSyntax,
    SegmentTracker,
    Step,
    resolve_syntax,
)

B, E, DOT = 1, 2, 9  # one-token markers and a boundary
PLAIN = SegmentSyntax((B,), (E,), frozenset({DOT}))

# -- streams over few ids, so that markers are nested, stray, unclosed, overlapping ------------------------------------

ids = st.integers(0, 2)
markers = st.lists(ids, min_size=1, max_size=4).map(tuple)
skips = st.tuples(st.just("skip"), st.integers(1, 3))


@st.composite
def syntaxes(draw):
    begin, end = draw(markers), draw(markers)
    assume(begin != end)
    return SegmentSyntax(begin, end, draw(st.frozensets(ids, min_size=1)))


@st.composite
def rows(draw, with_skips):
    """(syntax, first, items): random ids, and both markers whole, often enough that segments close."""
    syntax = draw(syntaxes())
    pieces = [ids.map(lambda i: [i]), st.just(list(syntax.begin)), st.just(list(syntax.end))]
    if with_skips:
        pieces.append(skips.map(lambda skip: [skip]))
    items = [item for piece in draw(st.lists(st.one_of(pieces), max_size=30)) for item in piece]
    return syntax, draw(st.integers(0, 5)), items


def advance(tracker, item):
    return tracker.feed(item) if isinstance(item, int) else tracker.skip(item[1])


def streamed(syntax, first, items):
    tracker = SegmentTracker(syntax, first)
    for item in items:
        advance(tracker, item)
    return tracker


def assert_is(tracker, expected):
    distance = expected.pop("mean_boundary_distance")
    assert {name: getattr(tracker, name) for name in expected} == expected
    assert tracker.mean_boundary_distance == pytest.approx(distance, nan_ok=True)


def oracle_of(syntax, first, items):
    return oracle.replay(syntax.begin, syntax.end, syntax.boundary, first, items)


@given(rows(with_skips=False))
@example((SegmentSyntax((0, 0, 1), (1, 1), frozenset({2})), 0, [0, 0, 0, 1, 1, 1]))
def test_streaming_is_replay_is_the_oracle(row):
    syntax, first, items = row
    tracker = streamed(syntax, first, items)
    assert tracker == SegmentTracker.replay(syntax, first, items)
    assert_is(tracker, oracle_of(syntax, first, items))


@given(rows(with_skips=True))
def test_streaming_with_later_turns_is_the_oracle(row):
    assert_is(streamed(*row), oracle_of(*row))


@given(rows(with_skips=True))
def test_every_step_says_what_it_changed(row):
    syntax, first, items = row
    tracker = SegmentTracker(syntax, first)
    for n, item in enumerate(items):
        before, after = (oracle_of(syntax, first, items[:end]) for end in (n, n + 1))
        step = advance(tracker, item)
        if step is None:
            assert after["segments"] == before["segments"]
            continue
        assert step.position == before["position"]
        assert step.boundary == (item in syntax.boundary)
        closed = [] if step.closed is None else [step.closed]
        assert before["segments"] + closed == after["segments"]
        assert tracker.open == after["open"]


@given(rows(with_skips=True))
def test_segments_are_ordered_disjoint_and_within_their_turn(row):
    syntax, first, items = row
    tracker = streamed(*row)
    at = first
    for detail, summary in tracker.segments:
        assert at <= detail[0] <= detail[1] == summary[0] < summary[1] <= tracker.position
        assert summary[1] - summary[0] >= len(syntax.begin) + len(syntax.end)
        for start, stop in tracker.prompts:
            assert stop <= detail[0] or summary[1] <= start
        at = summary[1]
    generated = sum(isinstance(item, int) for item in items)
    assert tracker.position == generated + sum(stop - start for start, stop in tracker.prompts)
    assert tracker.open is None or tracker.open >= at


@given(rows(with_skips=True), st.integers(0, 60))
def test_a_copy_goes_its_own_way(row, split):
    syntax, first, items = row
    tracker = streamed(syntax, first, items[:split])
    other = tracker.copy()
    assert other == tracker
    for item in items[split:]:
        advance(other, item)
    assert tracker == streamed(syntax, first, items[:split])
    assert other == streamed(syntax, first, items) == pickle.loads(pickle.dumps(other)) == copy.deepcopy(other)


# -- cases written out -------------------------------------------------------------------------------------------------


def test_two_summaries():
    tracker = SegmentTracker(PLAIN, 3)
    steps = tracker.feed_all([5, DOT, B, 6, E, 7, B, DOT, E, 8])
    first, second = Segment((3, 5), (5, 8)), Segment((8, 9), (9, 12))
    assert tracker.segments == [first, second]
    assert steps[4] == Step(7, first, False)
    assert steps[8] == Step(11, second, False)
    assert [step.position for step in steps if step.boundary] == [4, 10]
    assert sum(step.closed is not None for step in steps) == 2
    assert (tracker.position, tracker.generated, tracker.boundaries) == (13, 10, 2)
    assert tracker.mean_boundary_distance == 6


def test_a_summary_right_after_another_has_no_detail():
    assert SegmentTracker.replay(PLAIN, 2, [B, E, B, E]).segments[1] == Segment((4, 4), (4, 6))


def test_a_begin_inside_a_summary_restarts_it():
    tracker = SegmentTracker.replay(PLAIN, 0, [5, B, 6, 6, B, 7, E])
    assert tracker.segments == [Segment((0, 4), (4, 7))]
    assert (tracker.restarted, tracker.stray, tracker.open) == (1, 0, None)


def test_an_end_outside_a_summary_is_ignored():
    tracker = SegmentTracker.replay(PLAIN, 0, [5, E, 6, B, 7, E, E])
    assert tracker.segments == [Segment((0, 3), (3, 6))]
    assert (tracker.restarted, tracker.stray) == (0, 2)


def test_an_unclosed_summary_is_none():
    tracker = SegmentTracker.replay(PLAIN, 4, [5, B, 7])
    assert tracker.segments == []
    assert (tracker.open, tracker.abandoned) == (5, 0)


def test_a_marker_of_several_tokens_starts_at_its_first():
    syntax = SegmentSyntax((7, 7, 8), (8, 9), frozenset({DOT}))
    tracker = SegmentTracker(syntax, 2)
    tracker.feed_all([7, 7, 7])
    assert tracker.open is None
    tracker.feed(8)  # 7, 7, 7, 8: the marker overlaps its own start
    assert tracker.open == 3
    tracker.feed(9)  # the 8 belongs to the begin marker
    assert (tracker.segments, tracker.stray) == ([], 0)
    assert tracker.feed_all([8, 9])[-1] == Step(8, Segment((2, 3), (3, 9)), True)


def test_the_longer_of_two_markers_that_end_together_counts():
    syntax = SegmentSyntax((5, 6), (6,), frozenset({DOT}))
    tracker = SegmentTracker.replay(syntax, 0, [5, 6, 3, 6, 6])
    assert tracker.segments == [Segment((0, 0), (0, 4))]
    assert tracker.stray == 1
    swapped = SegmentSyntax((6,), (5, 6), frozenset({DOT}))
    assert SegmentTracker.replay(swapped, 0, [3, 6, 5, 6]).segments == [Segment((0, 1), (1, 4))]


def test_a_marker_is_a_boundary_only_where_it_is_listed():
    assert not any(step.boundary for step in SegmentTracker(PLAIN, 0).feed_all([5, B, 6, E]))
    listed = SegmentSyntax((B,), (E,), frozenset({DOT, E}))
    assert [step.boundary for step in SegmentTracker(listed, 0).feed_all([5, B, 6, E])] == [False, False, False, True]


def test_a_later_turn_closes_off_what_came_before():
    tracker = SegmentTracker.replay(PLAIN, 2, [5, 5])
    tracker.skip(3)
    tracker.feed_all([6, B, 6, E])
    assert tracker.segments == [Segment((7, 8), (8, 11))]
    tracker.feed_all([6, B, 6])
    tracker.skip(1)
    assert (tracker.open, tracker.abandoned) == (None, 1)
    tracker.feed(E)
    assert tracker.stray == 1
    assert tracker.prompts == [(0, 2), (4, 7), (14, 15)]


def test_no_marker_reaches_across_a_later_turn():
    syntax = SegmentSyntax((7, 8), (8, 9), frozenset({DOT}))
    tracker = SegmentTracker.replay(syntax, 0, [7])
    tracker.skip(1)
    tracker.feed(8)
    assert tracker.open is None


def test_distances_between_boundaries_leave_later_turns_out():
    tracker = SegmentTracker(PLAIN, 1)
    assert math.isnan(tracker.mean_boundary_distance)
    tracker.feed_all([5, DOT])
    assert math.isnan(tracker.mean_boundary_distance)
    tracker.skip(100)
    tracker.feed_all([5, 5, DOT, DOT])
    assert tracker.mean_boundary_distance == 2


def test_a_row_without_a_prompt():
    tracker = SegmentTracker.replay(PLAIN, 0, [5, B, E])
    assert tracker.prompts == []
    assert tracker.segments == [Segment((0, 1), (1, 3))]


def test_markers_as_lists_are_kept_as_tuples():
    assert SegmentSyntax([B], [E], {DOT}) == PLAIN  # type: ignore[arg-type]
    assert hash(resolve_syntax([B], [E], [DOT, DOT])) == hash(PLAIN)


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def words():
    """A tokenizer of few words, with an unknown token; a space is nothing to it, and it puts `so` before every text."""
    vocabulary = {word: i for i, word in enumerate(["[UNK]", "so", "begin", "end", ".", "!"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="so $A", special_tokens=[("so", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


def test_words(words):
    expected = SegmentSyntax((2,), (3, 3), frozenset({4, 5}))
    assert resolve_syntax("begin", "end end", tokenizer=words) == expected
    assert resolve_syntax("begin", [3, 3], {4, 5}, tokenizer=words, vocab_size=6) == expected
    assert resolve_syntax("begin", "end", ["nd"], tokenizer=words).boundary == {3}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "begin_marker: got '<|begin_of_summary|>', allowed: a string only with a tokenizer"),
        ({"begin_marker": [1]}, "end_marker: got '<|end_of_summary|>', allowed: a string only with a tokenizer"),
        ({"begin_marker": [1], "end_marker": [2]}, "boundaries: .* allowed: strings only with a tokenizer"),
        ({"begin_marker": []}, r"begin_marker: got \[\], allowed: a string or one or more token ids"),
        ({"begin_marker": 5}, "begin_marker: got 5, allowed: a string or one or more token ids"),
        ({"begin_marker": None}, "begin_marker: got None"),
        ({"begin_marker": [1, -1]}, r"begin_marker: got \[1, -1\], .* of at least 0"),
        ({"begin_marker": [True]}, r"begin_marker: got \[True\]"),
        ({"begin_marker": [1.0]}, r"begin_marker: got \[1.0\]"),
        ({"begin_marker": torch.tensor([1])}, "begin_marker: got tensor"),
        ({"begin_marker": [7], "vocab_size": 7}, r"begin_marker: got \[7\], .* below 7"),
        ({"begin_marker": [1], "end_marker": (1,)}, r"end_marker: got \(1,\), allowed: another marker than"),
        ({"begin_marker": [1], "end_marker": [2], "boundaries": []}, r"boundaries: got \[\], allowed: a collection of"),
        ({"begin_marker": [1], "end_marker": [2], "boundaries": "."}, "boundaries: got '.', allowed: a collection of"),
        ({"begin_marker": [1], "end_marker": [2], "boundaries": 3}, "boundaries: got 3"),
        ({"begin_marker": [1], "end_marker": [2], "boundaries": [3, "."]}, r"boundaries: got \[3, '.'\]"),
        ({"begin_marker": [1], "end_marker": [2], "boundaries": {-3}}, r"boundaries: got \{-3\}"),
        ({"begin_marker": [1], "end_marker": [2], "boundaries": {7}, "vocab_size": 7}, "boundaries: .* below 7"),
        ({"boundary_match": "prefix"}, r"boundary_match: got 'prefix', allowed: one of \('suffix', 'exact'\)"),
        ({"vocab_size": 0}, "vocab_size: got 0, allowed: an integer of at least 1"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        resolve_syntax(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"begin_marker": ""}, r"begin_marker: got '', allowed: a string that .* know \(its ids are \[\]\)"),
        ({"begin_marker": " "}, r"begin_marker: got ' ', .*\(its ids are \[\]\)"),
        ({"begin_marker": "begin it"}, r"begin_marker: got 'begin it', .*\(its ids are \[2, 0\]\)"),
        ({"end_marker": "<end>"}, r"end_marker: .*add_special_tokens\(.*\['<end>'\]\}\) and model.resize_token_embed"),
        ({"end_marker": "end", "vocab_size": 3}, r"end_marker: got 'end', .*model.resize_token_embeddings"),
        ({"end_marker": "begin"}, r"end_marker: got 'begin', allowed: another marker than .* \[2\]"),
        ({"end_marker": [2]}, r"end_marker: got \[2\], allowed: another marker than .* \[2\]"),
        ({"end_marker": [6]}, r"end_marker: got \[6\], .* below 6"),
        ({"boundaries": {6}}, r"boundaries: got \{6\}, .* below 6"),
        ({"boundaries": ["."], "boundary_match": "any"}, "boundary_match: got 'any'"),
        ({"boundaries": [".", ""]}, "boundaries: .* not empty"),
        ({"boundaries": [". "]}, "boundaries: .* without spaces at either end"),
        ({"boundaries": ["?"]}, r"boundaries: got \['\?'\], allowed: strings that match a token .*'suffix'"),
        ({"boundaries": ["nd"], "boundary_match": "exact"}, "boundaries: .*'exact'"),
    ],
)
def test_bad_input_with_a_tokenizer(words, arguments, message):
    with pytest.raises(ValueError, match=message):
        resolve_syntax(**{"begin_marker": "begin", "end_marker": "end", "tokenizer": words, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((), (2,), {3}), r"begin: got \(\), allowed: one or more token ids"),
        (((1,), (-2,), {3}), r"end: got \(-2,\)"),
        (((1,), (1,), {3}), r"end: got \(1,\), allowed: other ids than those of the begin marker"),
        (((1,), (2,), frozenset()), r"boundary: got frozenset\(\)"),
        (("<s>", (2,), {3}), "begin: got '<s>'"),
    ],
)
def test_bad_syntax(arguments, message):
    with pytest.raises(ValueError, match=message):
        SegmentSyntax(*arguments)


@pytest.mark.parametrize("first", [-1, 1.0, True, None, torch.tensor(1)])
def test_bad_first_position(first):
    with pytest.raises(ValueError, match="first: got"):
        SegmentTracker(PLAIN, first)


@pytest.mark.parametrize("token", [-100, "a", None, torch.tensor(3)])
def test_a_bad_token_changes_nothing(token):
    tracker = SegmentTracker.replay(PLAIN, 1, [5, B])
    before = tracker.copy()
    with pytest.raises(ValueError, match="token: got"):
        tracker.feed(token)
    assert tracker == before


@pytest.mark.parametrize("count", [0, -1, 2.0])
def test_a_bad_skip_changes_nothing(count):
    tracker = SegmentTracker.replay(PLAIN, 1, [5, B])
    before = tracker.copy()
    with pytest.raises(ValueError, match="count: got"):
        tracker.skip(count)
    assert tracker == before


def test_boundaries_are_looked_up_once_per_tokenizer(words, monkeypatch):
    own = copy.deepcopy(words)
    first = resolve_syntax("begin", "end", tokenizer=own)
    with monkeypatch.context() as patch:
        patch.setattr(own, "decode", None)
        assert resolve_syntax("begin", "end", tokenizer=own) == first
    own.add_special_tokens({"additional_special_tokens": ["<stop>!"]})
    assert resolve_syntax("begin", "end", tokenizer=own).boundary == first.boundary | {6}
    before = len(segments._BOUNDARY_IDS)
    del own
    gc.collect()
    assert len(segments._BOUNDARY_IDS) == before - 1


# -- a real tokenizer --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(packaged())


def ends_a_thought(text, match):
    while text.startswith(" "):
        text = text[1:]
    while text.endswith(" "):
        text = text[:-1]
    for listed in BOUNDARIES:
        if text == listed or (match == "suffix" and text[len(text) - len(listed) :] == listed):
            return True
    return False


@pytest.mark.real_model
@pytest.mark.parametrize("match", ["suffix", "exact"])
def test_every_token_of_a_real_vocabulary(tokenizer, match):
    boundary = resolve_syntax(tokenizer=tokenizer, boundary_match=match).boundary
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
    assert boundary == {i for i, text in enumerate(texts) if ends_a_thought(text, match)}


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("text", "suffix", "exact"),
    [
        *((text, True, True) for text in [".", "!", "?", "...", ":", "\n\n", "\n\n\n", " .", " ?", " :", " \n\n"]),
        *((text, True, False) for text in ["!).", "().", ".....", "\n\n\n\n", "??", '":']),
        *((text, False, False) for text in [",", "\n", " ", "  ", " the", "<|im_end|>", '."', ".,"]),
    ],
)
def test_tokens_of_a_real_vocabulary(tokenizer, text, suffix, exact):
    (token,) = tokenizer.encode(text, add_special_tokens=False)
    for match, expected in (("suffix", suffix), ("exact", exact)):
        assert (token in resolve_syntax(tokenizer=tokenizer, boundary_match=match).boundary) == expected


@pytest.mark.real_model
def test_a_boundary_is_one_token(tokenizer):
    """This tokenizer takes the last newline before a word for itself, so two of them are no boundary and three are."""
    tracker = SegmentTracker(resolve_syntax(tokenizer=tokenizer), 0)
    ids = tokenizer.encode("It holds. So\n\nbe\n\n\nit", add_special_tokens=False)
    steps = tracker.feed_all(ids)
    assert [tokenizer.decode([i]) for i, step in zip(ids, steps, strict=True) if step.boundary] == [".", "\n\n"]
    assert ids.count(tokenizer.encode("\n", add_special_tokens=False)[0]) == 3


@pytest.mark.real_model
@pytest.mark.parametrize("added", [True, False])
def test_real_markers(tokenizer, added):
    tokenizer = copy.deepcopy(tokenizer)
    known = len(tokenizer)
    if added:
        tokenizer.add_special_tokens({"additional_special_tokens": [BEGIN_MARKER, END_MARKER]})
    syntax = resolve_syntax(tokenizer=tokenizer)
    if added:
        assert (syntax.begin, syntax.end) == ((known,), (known + 1,))
        with pytest.raises(ValueError, match="resize_token_embeddings"):
            resolve_syntax(tokenizer=tokenizer, vocab_size=known)
    else:
        assert min(len(syntax.begin), len(syntax.end)) > 4
    assert not syntax.boundary & {*syntax.begin, *syntax.end}

    pieces = ["First we add.", "\n", BEGIN_MARKER, "Adding.", END_MARKER, "\n", "Then we stop."]
    encoded = [tokenizer.encode(piece, add_special_tokens=False) for piece in pieces]
    ids = tokenizer.encode("".join(pieces), add_special_tokens=False)
    tracker = SegmentTracker.replay(syntax, 10, ids)
    if added:
        assert [i for part in encoded for i in part] == ids
    else:
        # In the text, `.<` and its like are other tokens than those of the marker alone: only the begin is found.
        assert tracker.open is not None
        tracker = SegmentTracker.replay(syntax, 10, [i for part in encoded for i in part])
    begin = 10 + len(encoded[0]) + len(encoded[1])
    end = begin + sum(map(len, encoded[2:5]))
    assert tracker.segments == [Segment((10, begin), (begin, end))]
    assert tracker.boundaries == 3

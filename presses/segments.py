"""Which generated tokens are detail, which are their summary, and where a thought ends: read from token ids alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from math import nan
from typing import NamedTuple
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

from .scorers import require, require_int

BEGIN_MARKER = "<|begin_of_summary|>"
END_MARKER = "<|end_of_summary|>"
BOUNDARIES = (".", "!", "?", "...", ":", "\n\n", "\n\n\n")
BOUNDARY_MATCHES = ("suffix", "exact")

# Per tokenizer, the boundary ids of each (vocabulary size, texts, match) asked for so far.
_BOUNDARY_IDS: WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple, frozenset[int]]] = WeakKeyDictionary()


@dataclass(frozen=True)
class SegmentSyntax:
    """The token ids that begin a summary, end one, and end a thought; :func:`resolve_syntax` makes one of strings.

    A marker that contains the other anywhere but at its own end is never seen: the other one is complete first.

    Parameters
    ----------
    begin, end : tuple of int
        The ids of each marker, one or several.
    boundary : frozenset of int
        The ids that end a thought. A marker's ids are boundaries only if they are among them.

    Raises
    ------
    ValueError
        For an empty field, something that is no id, or equal markers.
    """

    begin: tuple[int, ...]
    end: tuple[int, ...]
    boundary: frozenset[int]

    def __post_init__(self) -> None:
        for name in ("begin", "end"):
            object.__setattr__(self, name, _checked_ids(name, getattr(self, name)))
        object.__setattr__(self, "boundary", frozenset(_checked_ids("boundary", self.boundary)))
        require("end", self.end, self.end != self.begin, "other ids than those of the begin marker")


def resolve_syntax(
    begin_marker: str | Sequence[int] = BEGIN_MARKER,
    end_marker: str | Sequence[int] = END_MARKER,
    boundaries: Collection[str] | Collection[int] = BOUNDARIES,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    boundary_match: str = "suffix",
    vocab_size: int | None = None,
) -> SegmentSyntax:
    """Turn markers and boundaries into ids.

    A marker of several tokens is found only where it is tokenised as it is when it stands alone, which the text around
    it can change. A marker that is one token of its own is always found.

    Parameters
    ----------
    begin_marker, end_marker : str or sequence of int
        What a summary stands between, as text or as token ids.
    boundaries : collection of str or of int
        Texts that end a thought, or the ids of such tokens. A token is one if its own text, without the spaces at
        either end (newlines stay), ends in one of the texts.
    tokenizer : PreTrainedTokenizerBase, optional
        Needed where something is given as text.
    boundary_match : {"suffix", "exact"}, default "suffix"
        With ``"exact"`` the token's text must equal one of the texts.
    vocab_size : int, optional
        Number of ids that the model knows. Default: what the tokenizer knows, for ids given as such.

    Raises
    ------
    ValueError
        For text without a tokenizer, markers that are equal, empty or not in the vocabulary, ids that do not exist,
        boundaries that are empty or match no token, another ``boundary_match``.
    """
    require("boundary_match", boundary_match, boundary_match in BOUNDARY_MATCHES, f"one of {BOUNDARY_MATCHES}")
    if vocab_size is not None:
        require_int("vocab_size", vocab_size, 1)
    limit = len(tokenizer) if vocab_size is None and tokenizer is not None else vocab_size
    begin, end = (
        _marker_ids(name, marker, tokenizer, vocab_size)
        if isinstance(marker, str)
        else _checked_ids(name, marker, limit, or_else="a string or ")
        for name, marker in (("begin_marker", begin_marker), ("end_marker", end_marker))
    )
    require("end_marker", end_marker, end != begin, f"another marker than begin_marker, which is {list(begin)} too")
    listed = not isinstance(boundaries, str) and isinstance(boundaries, Collection) and len(boundaries) > 0
    if listed and all(isinstance(boundary, str) for boundary in boundaries):
        return SegmentSyntax(begin, end, _boundary_ids(frozenset(boundaries), tokenizer, boundary_match))
    ids = _checked_ids("boundaries", boundaries, limit, or_else="a collection of strings, or ")
    return SegmentSyntax(begin, end, frozenset(ids))


def _checked_ids(name: str, value, limit: int | None = None, or_else: str = "") -> tuple[int, ...]:
    allowed = f"{or_else}one or more token ids of at least 0" + ("" if limit is None else f" and below {limit}")
    require(name, value, isinstance(value, Iterable), allowed)
    ids = tuple(value)
    ok = all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 and (limit is None or i < limit) for i in ids)
    require(name, value, bool(ids) and ok, allowed)
    return ids


def _marker_ids(name: str, marker: str, tokenizer, vocab_size: int | None) -> tuple[int, ...]:
    require(name, marker, tokenizer is not None, "a string only with a tokenizer, else a sequence of token ids")
    ids = tuple(tokenizer.encode(marker, add_special_tokens=False))
    known = bool(ids) and tokenizer.unk_token_id not in ids and (vocab_size is None or max(ids) < vocab_size)
    add = f'tokenizer.add_special_tokens({{"additional_special_tokens": [{marker!r}]}})'
    resize = "model.resize_token_embeddings(len(tokenizer))"
    allowed = f"a string that tokenizer and model know (its ids are {list(ids)}); to add it: {add} and {resize}"
    require(name, marker, known, allowed)
    return ids


def _boundary_ids(texts: frozenset, tokenizer, match: str) -> frozenset[int]:
    listed = sorted(texts)
    require("boundaries", listed, tokenizer is not None, "strings only with a tokenizer, else token ids")
    ok = all(text and text == text.strip(" ") for text in texts)
    require("boundaries", listed, ok, "strings that are not empty, without spaces at either end")
    known = _BOUNDARY_IDS.setdefault(tokenizer, {})
    key = (len(tokenizer), texts, match)  # tokens can only be added
    if key not in known:
        decoded = (tokenizer.decode([i], clean_up_tokenization_spaces=False).strip(" ") for i in range(len(tokenizer)))
        ends = tuple(texts)
        matching = (i for i, text in enumerate(decoded) if (text in texts if match == "exact" else text.endswith(ends)))
        known[key] = frozenset(matching)
    require("boundaries", listed, bool(known[key]), f"strings that match a token (boundary_match is {match!r})")
    return known[key]


class Segment(NamedTuple):
    """A summary, both markers included, and the detail before it, back to the previous summary or the prompt.

    Both are half-open ranges of positions in their row; the summary starts where the detail ends, which can be empty.
    """

    detail: tuple[int, int]
    summary: tuple[int, int]


class Step(NamedTuple):
    """What one token did: its position, the segment it completed if any, and whether a thought ends with it."""

    position: int
    closed: Segment | None
    boundary: bool


@dataclass
class SegmentTracker:
    """Reads one row token by token and finds its segments.

    A marker is found when its last id arrives, among the ids since the last marker and the last prompt, so no token
    belongs to two markers. Where both markers end at the same id the longer one counts.

    Parameters
    ----------
    syntax : SegmentSyntax
        Markers and boundaries.
    first : int
        Position of the first generated token: the length of the prompt. A row's first real token has position 0.

    Attributes
    ----------
    position : int
        Where the next token will stand.
    segments, prompts : list
        The completed ones, and half-open ranges of the prompt and of everything skipped, in order.
    open : int or None
        Where the summary that is being written began.
    restarted, stray, abandoned : int
        Begin markers inside a summary, which starts anew there, its detail reaching up to it; end markers outside one,
        which are ignored; summaries that a later prompt cut off.
    generated, boundaries : int
        Tokens fed, and boundaries among them.

    Raises
    ------
    ValueError
        If ``first`` is not an integer of at least 0; later for a token that is not one either.
    """

    syntax: SegmentSyntax
    first: int
    position: int = field(init=False)
    segments: list[Segment] = field(default_factory=list, init=False)
    prompts: list[tuple[int, int]] = field(init=False)
    open: int | None = field(default=None, init=False)
    restarted: int = field(default=0, init=False)
    stray: int = field(default=0, init=False)
    abandoned: int = field(default=0, init=False)
    generated: int = field(default=0, init=False)
    boundaries: int = field(default=0, init=False)
    _detail: int = field(init=False, repr=False)  # where the next detail begins
    _recent: tuple[int, ...] = field(default=(), init=False, repr=False)  # ids that can still be part of a marker
    _boundary_span: tuple[int, int] = field(default=(0, 0), init=False, repr=False)  # the first and the last, as counts

    def __post_init__(self) -> None:
        require_int("first", self.first, 0)
        self.position = self._detail = self.first
        self.prompts = [(0, self.first)] if self.first else []

    @classmethod
    def replay(cls, syntax: SegmentSyntax, first: int, ids: Iterable[int]) -> SegmentTracker:
        """The tracker of a row whose generated tokens are ``ids``."""
        tracker = cls(syntax, first)
        tracker.feed_all(ids)
        return tracker

    def copy(self) -> SegmentTracker:
        """An independent tracker in the same state."""
        other = copy(self)
        other.segments, other.prompts = self.segments[:], self.prompts[:]
        return other

    def feed_all(self, ids: Iterable[int]) -> list[Step]:
        """Take one generated token after the other."""
        return [self.feed(token) for token in ids]

    def feed(self, token: int) -> Step:
        """Take the next generated token."""
        require_int("token", token, 0)
        self.position += 1
        self.generated += 1
        boundary = token in self.syntax.boundary
        if boundary:
            self._boundary_span = (self._boundary_span[0] if self.boundaries else self.generated, self.generated)
            self.boundaries += 1
        return Step(self.position - 1, self._match(token), boundary)

    def _match(self, token: int) -> Segment | None:
        begin, end = self.syntax.begin, self.syntax.end
        self._recent = (*self._recent, token)[-max(len(begin), len(end)) :]
        ended = [marker for marker in (begin, end) if self._recent[-len(marker) :] == marker]
        if not ended:
            return None
        self._recent = ()
        if max(ended, key=len) == begin:
            self.restarted += self.open is not None
            self.open = self.position - len(begin)
        elif self.open is None:
            self.stray += 1
        else:
            segment = Segment((self._detail, self.open), (self.open, self.position))
            self.segments.append(segment)
            self.open, self._detail = None, self.position
            return segment
        return None

    def skip(self, count: int) -> None:
        """Step over ``count`` tokens that were fed at once, a later turn: they belong to the prompt, markers or not.

        What was generated before them and has no summary yet will get none.
        """
        require_int("count", count, 1)
        self.prompts.append((self.position, self.position + count))
        self.position += count
        self.abandoned += self.open is not None
        self.open, self._detail, self._recent = None, self.position, ()

    @property
    def mean_boundary_distance(self) -> float:
        """Mean number of generated tokens from one boundary to the next; NaN with fewer than two."""
        first, last = self._boundary_span
        return (last - first) / (self.boundaries - 1) if self.boundaries > 1 else nan

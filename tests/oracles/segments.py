"""The segments of one row, read from the whole list at once, in plain Python: slow and literal.

A row is its prompt length and a list of items: a token id, or ``("skip", n)`` for n tokens fed at once.
"""

import itertools
import math


def replay(begin, end, boundary, first, items):
    """All that a tracker knows after the last item, as a dictionary."""
    # One id per position, None where it belongs to a prompt.
    row = [None] * first
    prompts = [(0, first)] if first > 0 else []
    for item in items:
        if isinstance(item, int):
            row.append(item)
        else:
            prompts.append((len(row), len(row) + item[1]))
            row.extend([None] * item[1])

    result = {"segments": [], "prompts": prompts, "open": None, "restarted": 0, "stray": 0, "abandoned": 0}
    detail = first  # where the detail of the next segment starts
    for kind, start, stop in occurrences(begin, end, row):
        if kind == "prompt":
            if stop <= first:
                continue
            if result["open"] is not None:
                result["abandoned"] += 1
            result["open"] = None
            detail = stop
        elif kind == "begin":
            if result["open"] is not None:
                result["restarted"] += 1
            result["open"] = start
        elif result["open"] is None:
            result["stray"] += 1
        else:
            result["segments"].append(((detail, result["open"]), (result["open"], stop)))
            result["open"] = None
            detail = stop

    result["position"] = len(row)
    generated = [token for token in row if token is not None]
    at = [n for n, token in enumerate(generated) if token in boundary]
    distances = [later - earlier for earlier, later in itertools.pairwise(at)]
    result["generated"] = len(generated)
    result["boundaries"] = len(at)
    result["mean_boundary_distance"] = sum(distances) / len(distances) if distances else math.nan
    return result


def occurrences(begin, end, row):
    """(kind, start, stop) of every marker and of every token of a prompt, in order; no two share a position."""
    found = []
    for stop in range(1, len(row) + 1):
        if row[stop - 1] is None:
            found.append(("prompt", stop - 1, stop))
            continue
        longest = None
        for kind, marker in (("begin", begin), ("end", end)):
            start = stop - len(marker)
            if start < 0 or any(row[start + n] != marker[n] for n in range(len(marker))):
                continue
            if any(start < taken_stop for _, _, taken_stop in found):
                continue
            if longest is None or start < longest[1]:
                longest = (kind, start, stop)
        if longest is not None:
            found.append(longest)
    return found

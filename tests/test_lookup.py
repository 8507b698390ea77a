"""Prompt lookup: the longest stretch that ends as the text does, and what followed it."""

import random

import pytest

from blockpilot_hf.lookup import Lookup


def lookup(ids):
    made = Lookup()
    made.extend(ids)
    return made


def test_what_followed_the_same_tokens_is_found():
    assert lookup([5, 6, 7, 8, 9, 5, 6]).find(3) == (2, [7, 8, 9])
    assert lookup([5, 6, 7, 8, 9, 5, 6]).find(1) == (2, [7])


def test_the_longest_stretch_goes_before_the_latest_and_the_latest_of_equals_before_others():
    assert lookup([1, 2, 3, 10, 9, 2, 3, 11, 1, 2, 3]).find(1) == (3, [10])
    assert lookup([2, 3, 10, 4, 2, 3, 11, 5, 2, 3]).find(1) == (2, [11])


@pytest.mark.parametrize("ids", [[], [1], [1, 2, 3]])
def test_a_text_that_repeats_nothing_has_none(ids):
    assert lookup(ids).find(4) == (0, [])


def test_nothing_is_found_where_nothing_is_wanted():
    assert lookup([1, 1, 1]).find(0) == (0, [])


def test_a_repetition_goes_on_repeating():
    """Where fewer tokens followed than are wanted: the text went round once."""
    assert lookup([7, 1, 2, 3, 1, 2, 3]).find(8) == (3, [1, 2, 3, 1, 2, 3, 1, 2])
    assert lookup([4, 9, 9]).find(4) == (1, [9, 9, 9, 9])


def test_ids_may_come_in_any_pieces():
    ids = [random.Random(0).randrange(4) for _ in range(60)]
    pieces = Lookup()
    for start in range(0, 60, 7):
        pieces.extend(ids[start : start + 7])
        assert len(pieces) == min(start + 7, 60)
    assert pieces.find(9) == lookup(ids).find(9)


@pytest.mark.parametrize("seed", range(20))
def test_it_finds_what_a_search_of_everything_finds(seed):
    draw = random.Random(seed)
    ids = [draw.randrange(draw.choice((2, 5, 30))) for _ in range(50)]

    def shared(end):
        length = 0
        while length < end and ids[end - 1 - length] == ids[-1 - length]:
            length += 1
        return length

    best = max(range(1, len(ids)), key=lambda end: (shared(end), end))
    length, following = lookup(ids).find(6)
    assert length == shared(best)
    if length:
        whole = [*ids]
        while len(whole) < best + 6:
            whole.append(whole[len(whole) - (len(ids) - best)])
        assert following == whole[best : best + 6]


def test_long_texts_of_one_token_are_searched_in_part():
    """The time of a step must not grow with how often a token occurred."""

    class Counted(list):
        reads = 0

        def __getitem__(self, key):
            Counted.reads += 1
            return super().__getitem__(key)

    made = lookup([1, 2] * 5000)
    made._ids = Counted(made._ids)
    assert made.find(5) == (32, [1, 2, 1, 2, 1])
    assert Counted.reads < 200
    scattered = lookup([i if i % 2 else 0 for i in range(10_000)] + [0])
    scattered._ids = Counted(scattered._ids)
    Counted.reads = 0
    scattered.find(5)
    assert Counted.reads < 300

"""Prompt lookup: what followed the same words earlier in prompt and answer, as a draft that costs no pass.

Texts repeat themselves: code its names, summaries their source, a small target its own phrases. The longer the stretch
that is the same up to here, the likelier it goes on the same. After prompt lookup decoding (A. Saxena, 2023,
https://github.com/apoorvumang/prompt-lookup-decoding), with the longest match instead of the first of a fixed length.
Knows ids only.
"""

from collections import defaultdict
from collections.abc import Iterable

# Longer matches say no more, and more occurrences of a frequent token only take time.
_LONGEST_MATCH = 32
_OCCURRENCES = 64


class Lookup:
    """The ids so far, by where each of them stands."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._places: defaultdict[int, list[int]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, ids: Iterable[int]) -> None:
        """Take in the ids that follow."""
        for token_id in ids:
            self._places[token_id].append(len(self._ids))
            self._ids.append(token_id)

    def find(self, most: int) -> tuple[int, list[int]]:
        """
        The longest earlier stretch that ends as the text does, the latest of equally long ones.

        Args:
            most (`int`): Ids wanted.

        Returns:
            `tuple[int, list[int]]`: The length of the stretch, 0 if there is none, and the `most` ids that followed it.
            Where fewer followed, the text repeats what lies between, and so does the continuation.
        """
        ids = self._ids
        if not ids or most < 1:
            return 0, []
        end, longest, best = len(ids) - 1, 0, 0
        for place in reversed(self._places[ids[-1]][-_OCCURRENCES - 1 : -1]):
            length = 1
            while length < min(place + 1, _LONGEST_MATCH) and ids[place - length] == ids[end - length]:
                length += 1
            if length > longest:
                longest, best = length, place
            if length == _LONGEST_MATCH:
                break
        if not longest:
            return 0, []
        following = ids[best + 1 : best + 1 + most]
        while len(following) < most:
            following += following[: most - len(following)]
        return longest, following


__all__ = ["Lookup"]

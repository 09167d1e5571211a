"""When two texts say the same, without a model to compare them.

They do when their words are the same, or when nearly all their runs of three words are and they name the same numbers:
a tile of 512 in place of 1024 is another plan, however alike the sentences.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_WORD = re.compile(r"[a-z0-9_]+(?:\.[0-9]+)?")
_SHINGLE_WORDS = 3


@dataclass(frozen=True)
class PlanText:
    """A plan as far as comparing goes.

    Attributes:
        plan_id: The plan.
        words: Its words in lower case, in order.
        shingles: Its runs of three words.
        numbers: The words that hold a digit.
    """

    plan_id: str
    words: tuple[str, ...]
    shingles: frozenset[tuple[str, ...]]
    numbers: frozenset[str]

    @classmethod
    def of(cls, plan_id: str, text: str) -> PlanText:
        """Takes a plan's text apart."""
        words = tuple(_WORD.findall(text.lower()))
        size = min(_SHINGLE_WORDS, len(words))
        shingles = frozenset(words[start : start + size] for start in range(len(words) - size + 1))
        return cls(plan_id, words, shingles, frozenset(word for word in words if any(map(str.isdigit, word))))

    def repeats(self, other: PlanText, similarity: float) -> bool:
        """Whether it says what another one says; ``similarity`` is the least Jaccard index of the shingles."""
        if self.words == other.words:
            return True
        if self.numbers != other.numbers:
            return False
        union = self.shingles | other.shingles
        return bool(union) and len(self.shingles & other.shingles) / len(union) >= similarity

"""Integer polynomials over named symbols: subscripts, trip counts and sizes that are not all known numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

Monomial = tuple[str, ...]


@dataclass(frozen=True)
class Poly:
    """A sum of integer multiples of products of symbols.

    Attributes:
        terms: ``(symbols, coefficient)`` pairs, sorted, without zero coefficients. The empty product is the constant.
    """

    terms: tuple[tuple[Monomial, int], ...] = ()

    @staticmethod
    def of(value: int) -> Poly:
        """A constant."""
        return Poly((((), value),)) if value else Poly()

    @staticmethod
    def symbol(name: str) -> Poly:
        """One symbol: a loop index, a name whose value is unknown, or the text of an opaque expression."""
        return Poly((((name,), 1),))

    @staticmethod
    def _from(mapping: Mapping[Monomial, int]) -> Poly:
        return Poly(tuple(sorted((key, value) for key, value in mapping.items() if value)))

    def __add__(self, other: Poly) -> Poly:
        total = dict(self.terms)
        for key, value in other.terms:
            total[key] = total.get(key, 0) + value
        return Poly._from(total)

    def __neg__(self) -> Poly:
        return Poly(tuple((key, -value) for key, value in self.terms))

    def __sub__(self, other: Poly) -> Poly:
        return self + (-other)

    def __mul__(self, other: Poly) -> Poly:
        total: dict[Monomial, int] = {}
        for left, a in self.terms:
            for right, b in other.terms:
                key = tuple(sorted((*left, *right)))
                total[key] = total.get(key, 0) + a * b
        return Poly._from(total)

    @cached_property
    def value(self) -> int | None:
        """The number it is, or None when it contains symbols."""
        if not self.terms:
            return 0
        if len(self.terms) == 1 and self.terms[0][0] == ():
            return self.terms[0][1]
        return None

    @cached_property
    def symbols(self) -> frozenset[str]:
        """All symbols it contains."""
        return frozenset(name for key, _ in self.terms for name in key)

    def depends_on(self, names: Iterable[str]) -> bool:
        """Whether any of ``names`` occurs in it."""
        return not self.symbols.isdisjoint(names)

    def coefficient(self, name: str) -> Poly | None:
        """The factor of ``name``, or None when it is not linear in it."""
        rest: dict[Monomial, int] = {}
        for key, value in self.terms:
            count = key.count(name)
            if count > 1:
                return None
            if count == 1:
                remaining = list(key)
                remaining.remove(name)
                rest[tuple(remaining)] = value
        return Poly._from(rest)

    def without(self, name: str) -> Poly:
        """The terms in which ``name`` does not occur."""
        return Poly(tuple((key, value) for key, value in self.terms if name not in key))

    def rename(self, mapping: Mapping[str, str]) -> Poly:
        """Renames symbols."""
        total: dict[Monomial, int] = {}
        for key, value in self.terms:
            renamed = tuple(sorted(mapping.get(name, name) for name in key))
            total[renamed] = total.get(renamed, 0) + value
        return Poly._from(total)

    def divided_by(self, divisor: int) -> Poly | None:
        """Exact quotient, or None."""
        if divisor == 0 or any(value % divisor for _, value in self.terms):
            return None
        return Poly(tuple((key, value // divisor) for key, value in self.terms))

    def text(self) -> str:
        """Python source of it."""
        parts: list[str] = []
        for key, value in sorted(self.terms, key=lambda term: (term[0] == (), term[0])):
            plain = [name.split("@")[0] for name in key]
            factors = [name if name.isidentifier() else f"({name})" for name in plain]
            if not factors:
                parts.append(str(value))
            else:
                parts.append(" * ".join(factors if value == 1 else [str(value), *factors]))
        return " + ".join(parts) if parts else "0"


ZERO = Poly()
ONE = Poly.of(1)

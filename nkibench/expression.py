"""Arithmetic over shape parameters, as written in task files: ``2*M*N*K + M``."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

_BINARY: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
_MAX_EXPONENT = 4
_MAX_LENGTH = 400


class ExpressionError(ValueError):
    """An expression that is not plain arithmetic over the known names."""


def evaluate(text: str | int | float, names: Mapping[str, int]) -> float:
    """Computes an arithmetic expression.

    Args:
        text: Numbers, names, parentheses and ``+ - * / // **`` (exponents 0 to 4); a bare number is its own value.
        names: Values of the names.

    Returns:
        The value, an ``int`` where all operations are integral.

    Raises:
        ExpressionError: The text is something else, names an unknown parameter, or divides by zero.
    """
    if isinstance(text, (int, float)):
        return text
    if len(text) > _MAX_LENGTH:
        raise ExpressionError(f"an expression may have {_MAX_LENGTH} characters, this one has {len(text)}")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError) as error:
        raise ExpressionError(f"'{text}' is not an arithmetic expression") from error
    try:
        return _value(tree.body, names)
    except (ZeroDivisionError, OverflowError, RecursionError) as error:
        raise ExpressionError(f"'{text}' cannot be computed: {error}") from error


def _value(node: ast.expr, names: Mapping[str, int]) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return node.value
    if isinstance(node, ast.Name):
        if node.id not in names:
            raise ExpressionError(f"unknown parameter '{node.id}' (known: {', '.join(sorted(names)) or 'none'})")
        return names[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, names)
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left, names), _value(node.right, names)
        if isinstance(node.op, ast.Pow) and not (isinstance(right, int) and 0 <= right <= _MAX_EXPONENT):
            raise ExpressionError(f"exponents must be whole numbers from 0 to {_MAX_EXPONENT}")
        return _BINARY[type(node.op)](left, right)
    raise ExpressionError(f"'{ast.unparse(node)}' is not allowed: only numbers, parameters and + - * / // **")

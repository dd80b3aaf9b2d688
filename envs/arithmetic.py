"""Arithmetic on text that a model wrote: exact, bounded in size and time, and never `eval`."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from sparring.envs.tools import ToolError

__all__ = ["evaluate", "format_number"]

_MAX_CHARACTERS = 200
_MAX_BITS = 512  # of a numerator or a denominator: about 150 digits
_ALLOWED = re.compile(r"[0-9 \t\n.+\-*/%()]+", re.ASCII)
_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def evaluate(expression: str) -> Fraction:
    """The value of an expression of numbers, `+ - * / // % **` and parentheses, as an exact fraction.

    Raises:
        ToolError: for everything else, with what is allowed; also where a number would grow beyond 512 bits.
    """
    if len(expression) > _MAX_CHARACTERS:
        raise ToolError(f"the expression has {len(expression)} characters, at most {_MAX_CHARACTERS} are allowed")
    if not _ALLOWED.fullmatch(expression):
        raise ToolError("an expression holds only numbers, + - * / // % ** and parentheses, such as (3 + 4) * 2")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ToolError(f"{expression!r} is not a complete arithmetic expression") from None
    except ZeroDivisionError:
        raise ToolError("division by zero") from None


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number):
            return _bounded(_exact(number))
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign, operand=operand):
            return -_value(operand) if isinstance(sign, ast.USub) else _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _bounded(_power(_value(left), _value(right)))
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _BINARY:
            return _bounded(Fraction(_BINARY[type(operation)](_value(left), _value(right))))
    raise ToolError("an expression holds only numbers, + - * / // % ** and parentheses, such as (3 + 4) * 2")


def _exact(number: int | float) -> Fraction:
    return Fraction(repr(number))  # 0.1 is one tenth here, not the nearest binary fraction


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if exponent.denominator == 1:
        if abs(exponent) > _MAX_BITS or bits * abs(exponent) > 2 * _MAX_BITS:
            raise ToolError("the result of ** is too large")
        return Fraction(base ** int(exponent))
    if base < 0:
        raise ToolError("a negative number has no real fractional power")
    try:
        return _exact(float(base) ** float(exponent))
    except OverflowError:
        raise ToolError("the result of ** is too large") from None


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise ToolError("the numbers grow too large")
    return value


def format_number(value: Fraction) -> str:
    """An integer exactly, anything else to ten significant digits."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"

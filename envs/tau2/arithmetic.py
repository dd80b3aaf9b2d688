"""Upstream's `calculate` evaluates what the model wrote. A tower of powers would keep the process busy for ever."""

from __future__ import annotations

import ast
import math

__all__ = ["too_large"]

_MOST_BITS = 65_536  # far above the largest float, 2**1024, and still computed in microseconds


def too_large(expression: object) -> bool:
    """Whether evaluating needs an integer of more than 65,536 bits on the way, which no float holds.

    Only expressions with a power are looked at: without one, an integer is no longer than the text. Anything that is
    not an expression is for upstream to refuse.
    """
    if not isinstance(expression, str) or "**" not in expression:
        return False
    try:
        _value(ast.parse(expression.strip(), mode="eval").body)
    except _TooLarge:
        return True
    except Exception:
        return False
    return False


class _TooLarge(Exception):
    pass


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right):
            return _apply(op, _value(left), _value(right))
    raise ValueError("not arithmetic")


def _apply(op: ast.operator, left: float, right: float) -> float:
    match op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return _small(left * right)
        case ast.Div():
            return left / right
        case ast.FloorDiv():
            return left // right
        case ast.Pow():
            integers = isinstance(left, int) and isinstance(right, int)
            if integers and abs(left) > 1 and right * math.log2(abs(left)) > _MOST_BITS:
                raise _TooLarge
            return left**right
    raise ValueError("not arithmetic")


def _small(value: float) -> float:
    if isinstance(value, int) and value.bit_length() > 2 * _MOST_BITS:
        raise _TooLarge
    return value

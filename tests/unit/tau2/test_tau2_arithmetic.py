"""What `calculate` may not be given: a power that no float holds and no computer finishes."""

import pytest

from sparring.envs.tau2.arithmetic import too_large


@pytest.mark.parametrize(
    "expression", ["9**9**9", "9**9**9**9", "-(2**99999999)", "1 + 10 ** 1000000", "(9**999)**99999"]
)
def test_towers_of_powers_are_too_large(expression: str) -> None:
    assert too_large(expression)


@pytest.mark.parametrize(
    "expression",
    ["2 ** 10", "2**1023", "2**0.5", "1.5 ** 20", "(-8) ** 0.5", "0 ** 0", "1 ** 99999999", "2 ** -3", "2 + 2 **"],
)
def test_what_can_be_computed_is_left_to_upstream(expression: str) -> None:
    assert not too_large(expression)


@pytest.mark.parametrize("expression", [None, 3, "", "**", "(" * 5000 + "**", "__import__('os')", "2 ** x"])
def test_anything_else_is_left_to_upstream(expression: object) -> None:
    assert not too_large(expression)

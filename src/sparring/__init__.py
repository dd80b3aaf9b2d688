"""Gymnasium environments where language-model agents work over many turns, and a backend that trains them."""

from gymnasium.envs.registration import register as _register


def _register_env(name: str, entry_point: str) -> None:
    _register(id=f"sparring/{name}", entry_point=f"sparring.envs.{entry_point}")


_register_env("Calculator-v0", "calculator:Calculator")

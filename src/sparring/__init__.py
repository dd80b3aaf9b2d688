"""Gymnasium environments where language-model agents work over many turns, and a backend that trains them."""

from gymnasium.envs.registration import register as _register


def _register_env(env_id: str, module: str, name: str, **kwargs: str) -> None:
    """Entry points are strings, so that nothing is imported before an environment is made."""
    _register(
        id=f"sparring/{env_id}",
        entry_point=f"sparring.envs.{module}:{name}",
        vector_entry_point=f"sparring.envs.{module}:make_vector",
        kwargs=kwargs,
    )


_register_env("Calculator-v0", "calculator", "Calculator")
_register_env("GSM8K-v0", "gsm8k", "GSM8K")
_register_env("KeyLookup-v0", "key_lookup", "KeyLookup")
_register_env("SingleTurn-v0", "single_turn", "SingleTurn")
for _domain in ("airline", "retail", "telecom", "mock"):
    _register_env(f"Tau2-{_domain}-v0", "tau2.env", "Tau2Env", domain=_domain)

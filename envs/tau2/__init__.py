"""τ²-bench (Barres et al., 2025, arXiv:2506.07982) as environments. Importing this does not import the package
`tau2`."""

from sparring.envs.tau2.env import Judge, Tau2Env
from sparring.envs.tau2.scripted import GoldAgent, ScriptedUser
from sparring.envs.tau2.user import ModelUser, OpenAIModel, User, UserSide

__all__ = ["GoldAgent", "Judge", "ModelUser", "OpenAIModel", "ScriptedUser", "Tau2Env", "User", "UserSide"]

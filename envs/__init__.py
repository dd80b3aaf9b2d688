"""Environments where language-model agents work over many turns. Importing this imports no torch."""

from sparring.envs.core import ChatEnv
from sparring.envs.spaces import ChatText
from sparring.envs.tools import Tool, ToolBox, ToolError

__all__ = ["ChatEnv", "ChatText", "Tool", "ToolBox", "ToolError"]

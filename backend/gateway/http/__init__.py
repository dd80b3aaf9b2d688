"""The recorder's HTTP face: OpenAI's chat completions and responses, Anthropic's messages, and the admin routes."""

from sparring.backend.gateway.http.server import GatewayServer

__all__ = ["GatewayServer"]

"""The recorder of every model call: sessions, exact tokens, chat templates, tool calls. No torch here.

Its HTTP face is `sparring.backend.gateway.http.GatewayServer`.
"""

from sparring.backend.gateway.chat_format import ChatFormat
from sparring.backend.gateway.endpoint import Endpoint
from sparring.backend.gateway.record import SessionRecord
from sparring.backend.gateway.recorder import Recorder
from sparring.backend.gateway.session import Session

__all__ = ["ChatFormat", "Endpoint", "Recorder", "Session", "SessionRecord"]

"""SGLang as the sampler: a client of its HTTP endpoints, the process that runs it, and ways to bring it new weights."""

from sparring.backend.engines.sglang.engine import SGLangEngine
from sparring.backend.engines.sglang.server import ServerOptions, SGLangServer

__all__ = ["SGLangEngine", "SGLangServer", "ServerOptions"]

"""vLLM as the sampler: a client of its HTTP endpoints, the process that runs it, and ways to bring it new weights.

Written to the sources of vLLM 0.33.0 (`vllm/entrypoints/scale_out/token_in_token_out`, `vllm/entrypoints/rl/online`,
`vllm/distributed/weight_transfer`), and never run on a real vLLM: what is tested is tested against `fake_vllm`.
"""

from sparring.backend.engines.vllm.engine import VLLMEngine
from sparring.backend.engines.vllm.server import VLLMServer

__all__ = ["VLLMEngine", "VLLMServer"]

"""An adapter whose loading was not answered, on a server that refuses a name it has."""

import os
import stat

import pytest
import torch
from aiohttp import web

from sparring.backend.engines.remote.layout import WeightLayout
from sparring.backend.engines.remote.transport import Transport
from sparring.backend.engines.sglang.adapter import AdapterLoader
from sparring.config import LoraConfig
from sparring.errors import EngineError

LORA = LoraConfig(rank=2, alpha=4, target_modules=["q_proj"])


class Server:
    """As SGLang answers; the answers to the first `lost` loads get lost, after the work."""

    def __init__(self, lost: int) -> None:
        self.lost, self.names, self.loads, self.modes = lost, set(), 0, set()

    async def load(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = body["lora_name"]
        self.modes.add(stat.S_IMODE(os.stat(body["lora_path"]).st_mode))
        self.loads += 1
        if name in self.names:
            said = f"Failed to load LoRA adapter {name} because it is already loaded"
            return web.json_response({"success": False, "error_message": said}, status=400)
        self.names.add(name)
        if self.loads <= self.lost:
            request.transport.abort()
        return web.json_response({"success": True})

    async def unload(self, request: web.Request) -> web.Response:
        self.names.discard((await request.json())["lora_name"])
        return web.json_response({"success": True})


async def test_it_is_asked_for_once_and_may_be_staged_again(tiny_qwen3):
    server = Server(lost=1)
    app = web.Application()
    app.add_routes([web.post("/load_lora_adapter", server.load), web.post("/unload_lora_adapter", server.unload)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    transport = Transport(f"http://127.0.0.1:{runner.addresses[0][1]}")
    layout = WeightLayout.of_model(tiny_qwen3)
    loader = AdapterLoader(transport, layout, LORA, salt="ours", deadline_s=10)
    layer = "model.layers.0.self_attn.q_proj"
    outputs, inputs = layout.shapes[f"{layer}.weight"]
    tensors = {f"{layer}.lora_A.weight": torch.zeros(2, inputs), f"{layer}.lora_B.weight": torch.zeros(outputs, 2)}
    try:
        with pytest.raises(EngineError, match="dropped the connection"):
            await loader.stage(1, tensors.items())
        assert server.loads == 1, "sent again, it would be refused for a name that it has"
        staged = await loader.stage(1, tensors.items())
        assert server.names == {staged.name}
        assert server.modes == {0o700}, "its folder is nobody else's to read"
    finally:
        await transport.close()
        await runner.cleanup()

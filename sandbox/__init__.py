"""Where code that a model wrote runs: in a container, under bubblewrap, or, for trusted code alone, right here.

    async with await open_provider("auto", warm=4) as provider:
        async with await provider.take(SandboxSpec(memory_mib=512)) as sandbox:
            result = await sandbox.exec("python3 -c 'print(1)'", timeout_s=10)
"""

from sparring.sandbox.command import ExecResult
from sparring.sandbox.core import Sandbox
from sparring.sandbox.local import LocalProvider, LocalSandbox
from sparring.sandbox.provider import SandboxKind, SandboxProvider, open_provider
from sparring.sandbox.request import SandboxRequestError
from sparring.sandbox.session import ShellSession
from sparring.sandbox.spec import SandboxSpec
from sparring.sandbox.transfer import Snapshot

__all__ = [
    "ExecResult",
    "LocalProvider",
    "LocalSandbox",
    "Sandbox",
    "SandboxKind",
    "SandboxProvider",
    "SandboxRequestError",
    "SandboxSpec",
    "ShellSession",
    "Snapshot",
    "open_provider",
]

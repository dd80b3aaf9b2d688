"""Where code that a model wrote runs: in a container, under bubblewrap, or, for trusted code alone, right here.

    async with await open_provider("auto", warm=4) as provider:
        async with await provider.take(SandboxSpec(memory_mib=512)) as sandbox:
            result = await sandbox.exec("python3 -c 'print(1)'", timeout_s=10)
"""

from sparring.sandbox.core import ExecResult, Sandbox, SandboxRequestError, SandboxSpec, Snapshot
from sparring.sandbox.local import LocalProvider, LocalSandbox
from sparring.sandbox.provider import SandboxKind, SandboxProvider, open_provider
from sparring.sandbox.session import ShellSession

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

"""Any program as a policy: it is given a base_url, a key and a task, and nobody changes its code."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from sparring.agents.policy import Outcome
from sparring.agents.process import Finished, run_program
from sparring.agents.program import check_program
from sparring.agents.remote import served_at
from sparring.envs import ChatEnv
from sparring.errors import AgentError, ConfigError
from sparring.transcript import printable
from sparring.types import ChatClient, Message, StopReason

__all__ = ["BlackBoxPolicy"]

_PYTHON, _TASK_FILE = "{python}", "{task_file}"


@runtime_checkable
class _RecordedClient(Protocol):
    """What a session of the recorder knows beyond a `ChatClient`."""

    @property
    def said(self) -> Sequence[Message]: ...

    @property
    def exhausted(self) -> StopReason | None: ...


class BlackBoxPolicy:
    """Runs a command for each episode, in whatever virtual environment or sandbox the command itself enters.

    It gets `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY`, and no other variable of
    this process but PATH, HOME and LANG. What it prints is its answer. Its tools are its own; where one has the name
    of a tool of the environment, the environment runs the call too, from the record of what the model said, so that
    the reward is that of any other agent that said the same.

    Args:
        command: the program and its arguments. "{python}" among them is this process's interpreter, and "{task_file}"
            the path of a file with the task.
        task: "json": an object with the environment's `messages` and `tools` in OpenAI's format; "text": the last
            message alone. Written to standard input unless the command takes a file.
        environ: further variables.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        task: Literal["json", "text"] = "json",
        environ: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
    ) -> None:
        if not command or isinstance(command, str):
            raise ConfigError("a black box needs a command as a list, such as ['{python}', agent.py]")
        self._command = tuple(part.replace(_PYTHON, sys.executable) for part in command)
        self._task, self._environ, self._cwd = task, dict(environ or {}), cwd

    def check_start(self) -> None:
        """
        Raises:
            ConfigError: the program is not there, or is a Python that lacks its script or what that imports.
        """
        check_program(self._command, {**_own_environ(), **self._environ}, self._cwd, "the black box's command")

    async def play(self, env: ChatEnv, client: ChatClient) -> Outcome:
        base_url = served_at(client)
        if not isinstance(client, _RecordedClient):
            raise ConfigError(f"a black box is followed through the recorder, and {type(client).__name__} is none")
        environ = {
            **_own_environ(),
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": client.api_key,
            "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": client.api_key,
            **self._environ,
        }
        finished = await self._run(_task_text(env, self._task), environ)
        said = client.said
        await _follow(env, said)
        if finished.status != 0 and client.exhausted is not None:
            env.truncate(client.exhausted)
        elif finished.status != 0 and not env.done:
            complaint = printable(finished.errors[-2000:].strip())
            raise AgentError(f"{self._command[0]} ended with status {finished.status}: {complaint}")
        answer = finished.output.strip() or (said[-1].content if said else None)
        await env.finish(answer)
        env.truncate(StopReason.FINISHED)  # it has ended, whatever the environment would still have said to it
        return Outcome(env.stop_reason or StopReason.FINISHED, answer, env.failure)

    async def _run(self, task: str, environ: Mapping[str, str]) -> Finished:
        if not any(_TASK_FILE in part for part in self._command):
            return await run_program(self._command, task, environ, self._cwd)
        with tempfile.TemporaryDirectory(prefix="sparring-task-") as folder:
            path = Path(folder) / "task"
            path.write_text(task, encoding="utf-8")
            command = [part.replace(_TASK_FILE, str(path)) for part in self._command]
            return await run_program(command, "", environ, self._cwd)


def _own_environ() -> dict[str, str]:
    return {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}


def _task_text(env: ChatEnv, form: str) -> str:
    if form == "text":
        return env.messages[-1].content or ""
    return json.dumps({"messages": [message.to_openai() for message in env.messages], "tools": env.tools})


async def _follow(env: ChatEnv, said: Sequence[Message]) -> None:
    """Tell the environment what the model said, turn by turn, and run what calls its tools."""
    names = {tool["function"]["name"] for tool in env.tools}
    for message in said:
        await env.observe(message)
        for call in message.tool_calls:
            if call.name in names:
                await env.call_tool(call.name, call.arguments)

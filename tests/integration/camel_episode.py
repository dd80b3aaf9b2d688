"""Plays one episode with `CamelPolicy` in the CAMEL virtual environment; a gateway elsewhere samples and records.

Prints the result as a JSON object.
"""

import asyncio
import json
import os
import sys

from sparring.agents.camel import CamelPolicy
from sparring.agents.runner import make_runner
from sparring.types import EpisodeSpec

ENV_ID = "sparring/Calculator-v0"


class RemoteClient:
    """A session of a gateway in another process: an agent that speaks HTTP needs no more."""

    base_url = os.environ["OPENAI_BASE_URL"]
    api_key = os.environ["OPENAI_API_KEY"]


async def main(task_id: str, env_id: str = ENV_ID, env_kwargs: str = "{}") -> None:
    spec = EpisodeSpec("episode", "group", env_id, task_id, seed=0)
    result = await make_runner(env_id, json.loads(env_kwargs), CamelPolicy(), timeout_s=100)(spec, RemoteClient())
    failure = result.failure and result.failure.message
    print(json.dumps({"reward": result.reward, "reward_parts": dict(result.reward_parts), "failure": failure}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

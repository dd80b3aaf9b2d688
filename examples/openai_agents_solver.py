"""The agent of openai_agents.yaml: plain Agents SDK. The adapter hands it the gateway and the environment's tools."""

from agents import Agent

from sparring.agents.openai_agents import OpenAIAgentsPolicy


def make_policy() -> OpenAIAgentsPolicy:
    return OpenAIAgentsPolicy(Agent(name="solver"))

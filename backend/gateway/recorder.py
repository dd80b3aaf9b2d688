"""The one recorder: every model call of every episode passes through it, in process or over HTTP."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from sparring.backend.engines.base import Engine, SamplingParams
from sparring.backend.gateway.budget import Budget
from sparring.backend.gateway.chat_format import ChatFormat
from sparring.backend.gateway.record import SessionRecord
from sparring.backend.gateway.served import POLICY, ServedModel
from sparring.backend.gateway.session import Session
from sparring.errors import ConfigError, GatewayError
from sparring.types import Usage

__all__ = ["Recorder", "Totals"]

_RELEASE_TIMEOUT_S = 10.0


@dataclass
class Totals:
    """Sums over all sessions of a recorder, for its metrics."""

    sessions: int = 0
    usage: Usage = field(default_factory=Usage)
    breaks: Counter[str] = field(default_factory=Counter)
    normalised: Counter[str] = field(default_factory=Counter)


class Recorder:
    """Sessions over one engine. Everything in it belongs to one event loop; nothing in it is a thread.

    Args:
        sampling: the run's settings; a training session samples with these whatever its client asks for.
        max_length: context length in tokens, prompt and completion together.
        aliases: further model names that mean the policy; None: every name that is no frozen model's, since agents
            carry the names of other people's models in their code.

    Attributes:
        models: what answers, by policy id: the trained one, and frozen ones beside it.
        sessions: those that are open, by id.
        base_url: where the HTTP face listens, or None where it does not run.
    """

    def __init__(
        self,
        engine: Engine,
        chat: ChatFormat,
        sampling: SamplingParams,
        *,
        max_length: int,
        aliases: Collection[str] | None = None,
    ) -> None:
        self.engine, self.chat, self.sampling = engine, chat, sampling
        self.aliases = None if aliases is None else frozenset(aliases)
        self.models = {POLICY: ServedModel(POLICY, engine, chat, sampling, max_length)}
        self.base_url: str | None = None
        self.totals = Totals()
        self.sessions: dict[str, Session] = {}
        self._keys: dict[str, Session] = {}
        self._releases: set[asyncio.Task[None]] = set()

    def add_frozen(
        self, policy_id: str, engine: Engine, chat: ChatFormat, sampling: SamplingParams, *, max_length: int
    ) -> None:
        """Serve another model beside the policy, by that name: an opponent, a simulated user, a judge. Never trained.

        Raises:
            ConfigError: the name is taken.
        """
        if policy_id in self.models:
            raise ConfigError(f"a model named {policy_id!r} is served already")
        self.models[policy_id] = ServedModel(policy_id, engine, chat, sampling, max_length, trained=False)

    def policy_for(self, name: str) -> str:
        """The policy id that a client's model name means.

        Raises:
            GatewayError: 404, it is no served model's name, and none of the aliases.
        """
        if name in self.models:
            return name
        if self.aliases is None or name in self.aliases:
            return POLICY
        raise GatewayError(
            f"the model {name!r} does not exist; there are {', '.join(self.model_names)}",
            status=404,
            param="model",
            code="model_not_found",
        )

    @property
    def model_names(self) -> tuple[str, ...]:
        """Every name that a client may ask for, as far as they are known."""
        return tuple(dict.fromkeys((*self.models, *sorted(self.aliases or ()))))

    def open_session(
        self,
        session_id: str,
        *,
        turn_budget: int,
        token_budget: int,
        evaluation: SamplingParams | None = None,
        deadline_s: float | None = None,
        api_key: str | None = None,
    ) -> Session:
        """Begin an episode.

        Args:
            turn_budget: model calls.
            token_budget: sampled tokens, over all turns.
            evaluation: how an evaluation episode samples by default; None: a training episode, sampled as the run says.
            deadline_s: seconds from now after which every request of the session fails.
            api_key: names the session over HTTP; None draws one.

        Raises:
            GatewayError: status 409, the id or the key is in use.
        """
        if session_id in self.sessions:
            raise GatewayError(f"session {session_id} is already open", status=409, param="session_id")
        key = api_key or f"sk-sparring-{secrets.token_urlsafe(24)}"
        if key in self._keys:
            raise GatewayError("this api key already names an open session", status=409, param="api_key")
        session = Session(
            self,
            session_id,
            key,
            models=self.models,
            evaluation=evaluation,
            budget=Budget(turns=turn_budget, tokens=token_budget),
            deadline=None if deadline_s is None else asyncio.get_running_loop().time() + deadline_s,
        )
        self.sessions[session_id] = self._keys[key] = session
        self.totals.sessions += 1
        return session

    def session_for(self, api_key: str) -> Session | None:
        """The open session that an api key names."""
        return self._keys.get(api_key)

    def close_session(self, session_id: str) -> SessionRecord:
        """End an episode; requests that still run fail. Needs the running event loop.

        Raises:
            GatewayError: status 404, no such session is open.
        """
        session = self.sessions.pop(session_id, None)
        if session is None:
            raise GatewayError(f"session {session_id} is not open", status=404, param="session_id")
        del self._keys[session.api_key]
        task = asyncio.get_running_loop().create_task(self._release(session))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)
        return session.close()

    async def aclose(self) -> None:
        """End every session, their records dropped, and wait until the engine has forgotten them."""
        for session_id in tuple(self.sessions):
            self.close_session(session_id)
        if self._releases:
            await asyncio.wait(self._releases)

    async def _release(self, session: Session) -> None:
        try:
            async with asyncio.timeout(_RELEASE_TIMEOUT_S):
                for model in self.models.values():
                    for lineage in session.lineages:
                        await model.engine.release(lineage)
        except Exception:  # an engine that is dead keeps nothing
            pass

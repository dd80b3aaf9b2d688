"""The admin routes: sessions started, rewarded, ended and exported from outside, as AReaL's proxy has them."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from sparring.backend.gateway.export import Sample, concat_samples, individual_samples
from sparring.backend.gateway.http.body import Body, read_body
from sparring.backend.gateway.http.ledger import Ledger
from sparring.backend.gateway.http.streams import unless_disconnected
from sparring.backend.gateway.recorder import Recorder
from sparring.backend.gateway.session import Session
from sparring.errors import GatewayError

__all__ = ["end_session", "export_trajectories", "grant_capacity", "set_reward", "start_session"]

_INVALID = 422
_MOST_CHARACTERS = 512


class _StartBody(Body):
    task_id: str = Field(min_length=1, max_length=_MOST_CHARACTERS)
    api_key: str | None = Field(None, min_length=8, max_length=_MOST_CHARACTERS)
    evaluation: bool = False
    turn_budget: int | None = Field(None, ge=1)
    token_budget: int | None = Field(None, ge=1)
    deadline_s: float | None = Field(None, gt=0)


class _RewardBody(Body):
    reward: float
    interaction_id: str | None = None


class _ExportBody(Body):
    session_id: str
    discount: float = Field(1.0, ge=0, le=1)
    style: Literal["individual", "concat"] = "individual"


async def start_session(request: Request, recorder: Recorder, ledger: Ledger, admin_key: str) -> Response:
    body = await read_body(request, _StartBody, invalid_status=_INVALID)
    if body.api_key == admin_key:
        raise GatewayError("the admin key cannot be a session's key", param="api_key")
    session = ledger.start(
        body.task_id,
        api_key=body.api_key,
        evaluation=recorder.sampling if body.evaluation else None,
        turn_budget=body.turn_budget,
        token_budget=body.token_budget,
        deadline_s=body.deadline_s,
    )
    return JSONResponse({"session_id": session.session_id, "api_key": session.api_key})


async def grant_capacity(ledger: Ledger) -> Response:
    if ledger.capacity is not None:  # None: any number may start already
        ledger.capacity += 1
    return JSONResponse({"capacity": ledger.capacity})


async def set_reward(request: Request, session: Session) -> Response:
    body = await read_body(request, _RewardBody, invalid_status=_INVALID)
    session.set_reward(body.reward, body.interaction_id)
    return JSONResponse({"message": "success"})


async def end_session(session: Session, ledger: Ledger) -> Response:
    finished = ledger.end(session)
    return JSONResponse({"message": "success", "interaction_count": finished.record.usage.turns})


async def export_trajectories(request: Request, ledger: Ledger) -> Response:
    """Samples of an ended session, by interaction id: arrays as lists, the keys as AReaL names them."""
    body = await read_body(request, _ExportBody, invalid_status=_INVALID)
    finished = await unless_disconnected(request, ledger.export(body.session_id))
    record = finished.record
    samples = (individual_samples if body.style == "individual" else concat_samples)(
        record.tree, record.rewards, body.discount
    )
    return JSONResponse(
        {
            "interactions": {sample.interaction_id: _interaction(sample) for sample in samples},
            "stop_reason": record.exhausted,
            "failure": finished.failure and {"kind": finished.failure.kind, "message": finished.failure.message},
            "breaks": dict(record.breaks),
            "normalised": dict(record.normalised),
        }
    )


def _interaction(sample: Sample) -> dict[str, Any]:
    sequence = sample.sequence
    return {
        "tensor_dict": {
            "input_ids": sequence.token_ids.tolist(),
            "loss_mask": sequence.action_mask.astype(int).tolist(),
            "logprobs": sequence.behaviour_logprobs.tolist(),
            "versions": sequence.policy_versions.tolist(),
        },
        "reward": sample.reward,
        "interaction_id": sample.interaction_id,
    }

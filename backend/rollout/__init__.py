"""Rollouts: which groups may start, playing them, and handing whole batches to the trainer."""

from sparring.backend.rollout.admission import Admission, capacity
from sparring.backend.rollout.batch import Batch
from sparring.backend.rollout.sampler import TaskSampler
from sparring.backend.rollout.worker import RolloutWorker

__all__ = ["Admission", "Batch", "RolloutWorker", "TaskSampler", "capacity"]

"""Rollouts: which groups may start, playing them, and handing whole batches to the trainer."""

from sparring.backend.rollout.admission import Admission, capacity
from sparring.backend.rollout.batch import Batch
from sparring.backend.rollout.curriculum import Curriculum
from sparring.backend.rollout.sampler import MixtureSampler, TaskSampler
from sparring.backend.rollout.worker import RolloutWorker

__all__ = ["Admission", "Batch", "Curriculum", "MixtureSampler", "RolloutWorker", "TaskSampler", "capacity"]

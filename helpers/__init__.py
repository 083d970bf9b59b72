"""Predict, measure and judge the GPU memory of training: the helpers that every lesson imports."""

from . import show
from .hardware import describe, device, gib, gpu, supports
from .memory import free, measure
from .prediction import Prediction, predict
from .runs import Run, compare, load, record
from .training import train
from .workloads import Workload, language_modelling, text_classification

__all__ = (
    "Prediction Run Workload compare describe device free gib gpu language_modelling load measure "
    "predict record show supports text_classification train"
).split()

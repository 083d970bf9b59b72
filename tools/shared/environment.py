"""The environment variables that tests, course runs and refreshed outputs share."""

import os

# MPLBACKEND is left out on purpose: a kernel that finds it set shows no inline figures.
VARIABLES = {
    "OMP_WAIT_POLICY": "PASSIVE",  # idle threads sleep: step times stay steady on a busy machine
    "CUDA_VISIBLE_DEVICES": "0",  # the Trainer that a lesson builds by hand would use every card
    "KINETO_LOG_LEVEL": "99",  # the profiler's start-up lines would be stored as stderr
    "HF_HUB_OFFLINE": "1",  # without a network a hub id otherwise takes most of a minute to fail
    "TQDM_DISABLE": "1",  # a progress bar is not an output worth keeping
    "TOKENIZERS_PARALLELISM": "false",  # a warning after every fork otherwise
}


def with_variables() -> dict[str, str]:
    """A copy of this process's environment; what the user has set already is kept."""
    return VARIABLES | os.environ


def set_variables() -> None:
    """The same for this process and its children; call it before torch is imported."""
    os.environ.update(with_variables())

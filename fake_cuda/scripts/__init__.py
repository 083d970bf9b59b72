"""A training script that nobody changed, on a card that nobody has: nothing of the user's changes.

script = Script("train.py", ["--batch", "8"])
simulate(script, (8, 0)).peak_allocated, script.note, script.printed
"""

from .script import Script

__all__ = ["Script"]

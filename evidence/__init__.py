"""What others measured, done again: see README.md. It loads the simulation's names first, which
quiets libraries that print when they load."""

import fake_cuda  # noqa: F401

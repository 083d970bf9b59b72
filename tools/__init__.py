"""What `make X` runs: one file a target, of the same name. See README.md here."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # of the repository

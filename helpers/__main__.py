"""Says where the command went."""

import sys

print(
    "error: the command is called onegpu now: onegpu --help, or python -m planner", file=sys.stderr
)
sys.exit(2)

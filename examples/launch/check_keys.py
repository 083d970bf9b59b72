"""Keys inside the blocks of a launch file that `accelerate launch` would silently ignore."""

import sys
from pathlib import Path

import yaml
from accelerate.commands.launch import launch_command_parser


def unknown_keys(path):
    switches = vars(launch_command_parser().parse_args(["train.py"]))
    blocks = yaml.safe_load(Path(path).read_text()).values()
    return [key for block in blocks if isinstance(block, dict) for key in block.keys() - switches]


if __name__ == "__main__":
    if unknown := unknown_keys(sys.argv[1]):
        sys.exit(f"{sys.argv[1]}: accelerate launch does not know {', '.join(unknown)}")

"""What several processes that a launcher started know of each other."""

import os


def num_processes() -> int:
    """The processes that a launcher started."""
    return int(os.environ.get("WORLD_SIZE", 1))


def is_first_process() -> bool:
    """Whether this is the first of the processes that a launcher started, or the only one."""
    return int(os.environ.get("RANK", 0)) == 0

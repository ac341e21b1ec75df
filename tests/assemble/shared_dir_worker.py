"""Runs launch/train.py on ranks that have different working directories, like nodes with local disks.

The first argument is a folder; rank N works in its subfolder N. The others are those of launch/train.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import launch.train
from ppo_ds.storage import shared_directory


def main() -> int:
    folder = Path(sys.argv[1], os.environ["RANK"])
    folder.mkdir(parents=True)
    os.chdir(folder)
    shared_directory.VISIBLE_SECONDS = 0.5
    return launch.train.main(sys.argv[2:])

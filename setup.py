"""Adds the folders of the commands and of the configs to the package; setup.cfg has everything else."""

from setuptools import find_packages, setup

FOLDERS = {"ppo_ds.commands.launch": "launch", "ppo_ds.commands.conf": "conf"}

setup(packages=[*find_packages(include=["ppo_ds", "ppo_ds.*"]), *FOLDERS], package_dir=FOLDERS)

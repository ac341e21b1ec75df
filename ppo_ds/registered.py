"""Holds the functions and classes that ``ppo_ds.register`` has added in this process, keyed by name."""

"""Runs parts of ppo_ds on the simulated GPU. fake_cuda.py must be imported first, as __main__.py does."""

"""Drives of ppo_ds on the simulated GPU. Import fake_cuda.py first, as ``python -m tests.gpu_sim`` does."""

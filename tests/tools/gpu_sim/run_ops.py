"""Runs ops and the decode slots on a simulated GPU: python tests/tools/gpu_sim/run_ops.py"""

from simulated_cuda import fake_cuda, show, torch  # isort: skip
from ppo_ds.ops.linear_logprobs import linear_logprobs_and_entropy
from ppo_ds.ops.logprobs import logprobs_and_entropy_from_logits
from ppo_ds.rollout.base import SamplingParams
from ppo_ds.rollout.slots import Slots

CUDA = torch.device("cuda")

for dtype in (torch.bfloat16, torch.float16, torch.float32):
    with fake_cuda() as mode:
        hidden = torch.randn(300, 64, device=CUDA, dtype=dtype).requires_grad_()
        weight = torch.randn(1000, 64, device=CUDA, dtype=dtype).requires_grad_()
        labels = torch.zeros(300, dtype=torch.long, device=CUDA)
        for with_entropy in (True, False):
            for kept in (0, 2**25):
                logprobs, entropy = linear_logprobs_and_entropy(
                    hidden,
                    weight,
                    None,
                    labels,
                    0.7,
                    with_entropy=with_entropy,
                    kept_elements=kept,
                    block_elements=30_000,
                )
                (logprobs.sum() + (entropy.sum() if with_entropy else 0)).backward()
        print(dtype, logprobs.dtype, logprobs.device, weight.grad.dtype, weight.grad.device)
        logits = torch.randn(3, 50, 1000, device=CUDA, dtype=dtype).requires_grad_()
        targets = torch.zeros(3, 50, dtype=torch.long, device=CUDA)
        logprobs, entropy = logprobs_and_entropy_from_logits(logits, targets)
        (logprobs.sum() + entropy.sum()).backward()
    show(mode)

for top_k, top_p in ((0, 1.0), (50, 0.9), (1, 1.0)):
    for stops, minimum in (((2, 5), 3), ((), 0)):
        with fake_cuda() as mode:
            sampling = SamplingParams(32, minimum, 1.0 if top_k else 0.7, top_p, top_k, stops, ())
            uniforms = torch.rand(8, 32, dtype=torch.float64, device=CUDA)
            slots = Slots(4, torch.full((8,), 32), uniforms, sampling)
            mode.capturing = True
            slots.step(3, lambda t, p: torch.randn(len(t), 1000, device=CUDA, dtype=torch.bfloat16))
        print(f"top_k={top_k} top_p={top_p} stops={stops}: {sum(mode.ops.values())} operations in a step")
        show(mode)

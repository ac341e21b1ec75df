"""Trains policies and critics for one micro-batch on a simulated GPU, padded and packed.

python tests/tools/gpu_sim/run_models.py [moe | gemma]
"""

import sys
from functools import partial

from simulated_cuda import SIZES, fake_cuda, show, torch  # isort: skip
from torch.nn.functional import pad
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from ppo_ds.config.registry import KL_ESTIMATORS, POLICY_LOSSES, resolve
from ppo_ds.config.sections.algo import EntropyConfig, PolicyConfig, ValueConfig
from ppo_ds.models.packed_attention import may_pack
from ppo_ds.models.policy import Policy
from ppo_ds.models.value import ScoreModel
from ppo_ds.ops.losses import batch_totals
from ppo_ds.ppo.losses import PolicyObjective, ValueObjective
from ppo_ds.types import Experience

torch.cuda.get_device_capability = lambda device=None: (9, 0)
CUDA = torch.device("cuda")
if "moe" in sys.argv:
    experts = dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    configs = {
        "qwen3moe": Qwen3MoeConfig(**SIZES, **experts),
        "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    }
elif "gemma" in sys.argv:
    configs = {"gemma2": Gemma2Config(**SIZES, head_dim=16)}
else:
    configs = {
        "qwen2": Qwen2Config(**SIZES),
        "llama": LlamaConfig(**SIZES),
        "qwen3": Qwen3Config(**SIZES, head_dim=16),
    }


def minibatch(rows: int = 3, prompt: int = 5, width: int = 7) -> Experience:
    ids = torch.randint(0, 500, (rows, prompt + width))
    mask = torch.ones(rows, prompt + width, dtype=torch.bool)
    mask[0, :2] = False
    mask[1, -3:] = False
    actions = mask[:, prompt:].clone()
    tokens, states = partial(torch.randn, rows, width), partial(torch.randn, rows, width + 1)
    values = {
        "ids": ids,
        "attention_mask": mask,
        "response_mask": actions,
        "finished": torch.ones(rows, dtype=torch.bool),
        "decode_logprobs": tokens(),
        "rewards": states(),
        "advantages": tokens(),
        "weights": torch.ones(rows, width),
        "scores": torch.randn(rows),
        "logprobs": tokens(),
        "old_logprobs": tokens(),
        "ref_logprobs": tokens(),
        "values": states(),
        "returns": states(),
        "value_mask": pad(actions, (0, 1)),
    }
    return Experience(**values)


def policy_loss(policy: Policy, rows: Experience) -> torch.Tensor:
    loss = POLICY_LOSSES["ppo"]
    objective = PolicyObjective(
        loss=resolve(loss),
        sums_over_tokens=loss.sums_over_tokens,
        clip=PolicyConfig(),
        entropy=EntropyConfig(coef=0.01),
        kl=resolve(KL_ESTIMATORS["k3"]),
        aux_coef=0.0,
        agg="token_mean",
        level="token",
    )
    out = policy(rows.ids, rows.attention_mask, rows.response_width, with_entropy=True)
    return objective(out, rows.to(CUDA), batch_totals([rows.response_mask], dp_size=1), 0.1)[0]


for name, config in configs.items():
    for checkpointing in (False, True):
        with fake_cuda() as mode:
            with torch.device("cuda"):
                lm = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            if checkpointing:
                lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
                lm.train()
            policy, rows = Policy(lm, 1.0), minibatch()
            for packed in sorted({False, may_pack(lm, "auto", CUDA)}):
                policy.packed = packed
                for _ in range(2):  # the first pass detects how the model uses its head
                    mode.clear()
                    policy_loss(policy, rows).backward()
                kernels = {op: n for op, n in mode.ops.items() if "attention" in op or "varlen" in op}
                how = ("checkpointed " if checkpointing else "") + ("packed" if packed else "padded")
                print(name, how, kernels, sum(mode.ops.values()))
                show(mode)
    with fake_cuda() as mode:
        config.num_labels = 1
        with torch.device("cuda"):
            classifier = AutoModelForSequenceClassification.from_config(config, dtype=torch.bfloat16)
        critic, rows = ScoreModel(classifier), minibatch()
        mode.clear()
        values = critic(rows.ids, rows.attention_mask, rows.response_width)
        totals = batch_totals([rows.value_mask], dp_size=1)
        ValueObjective(ValueConfig(), "token_mean")(values, rows.to(CUDA), totals)[0].backward()
        scores = critic.scores(rows.ids, rows.attention_mask)
        print(name, "critic", values.device, scores.device)
        show(mode)

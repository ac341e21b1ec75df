"""Names of the cases of all drives. Does not import torch, so that pytest can collect the tests.

A case runs a part of ppo_ds on the simulated device and yields one Report. ``drives/NAME.py`` has the cases
of the drive NAME as ``CASES``, a function for each of these names.
"""

DTYPES = ("bf16", "fp16", "fp32")
OPS = (
    "linear_logprobs",
    "logprobs",
    "masked",
    "kl",
    "advantages",
    "group_advantages",
    "rewards",
    "sequences",
    "token_sampling",
    "running",
    "losses",
    "pairwise_loss",
)
DENSE = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt2", "gpt_neox", "opt")
EXPERTS = ("qwen3_moe", "mixtral")
FAMILIES = DENSE + EXPERTS
PADDED_ONLY = ("gemma2",)  # families whose rows are never packed
# families that the static backend decodes; gpt_oss has its own attention sinks
DECODED = ("llama", "qwen2", "qwen3", "mistral", "gemma2", *EXPERTS, "gpt_oss")
ENCODERS = ("deberta", "roberta", "bert")
LEARNED = ("ppo", "target_kl", "first_forward", "shared_trunk", "critic_free", "ptx", "packed", "packed fp32")

CASES: dict[str, tuple[str, ...]] = {
    "ops": tuple(f"{op} {dtype}" for op in OPS for dtype in DTYPES),
    "models": (
        *(f"{family} padded" for family in FAMILIES),
        *(f"{family} packed" for family in ("llama", "gpt2")),
        # with packed rows, except for PADDED_ONLY
        *(f"{family} checkpointed with adapters" for family in FAMILIES),
        *(f"{family} critic" for family in FAMILIES if family != "gpt_neox"),
        *(f"{family} frozen" for family in FAMILIES),
    ),
    "decoding": (*DECODED, "stop strings", "several waves", "without graphs"),
    "learner": (
        *(f"{what} {micros} micro-batches" for what in LEARNED for micros in (2, 4)),
        *(f"experience {micros} forwards" for micros in (2, 4)),
    ),
    "scoring": (*ENCODERS, *(f"{family} reward model" for family in DENSE if family not in ("opt",))),
    "finetune": tuple(),
}

"""Lists the names of the cases of all drives. Does not import torch, so that pytest can collect the tests.

A case runs a part of ppo_ds on the simulated device and yields one Report. ``drives/NAME.py`` has the cases
of the drive NAME as ``CASES``, a function for each of these names.
"""

DENSE = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt2", "gpt_neox", "opt")
EXPERTS = ("qwen3_moe", "mixtral")
FAMILIES = DENSE + EXPERTS
PADDED_ONLY = ("gemma2",)  # families whose rows are never packed
# families that the static backend decodes; gpt_oss has its own attention sinks
DECODED = ("llama", "qwen2", "qwen3", "mistral", "gemma2", *EXPERTS, "gpt_oss")
ENCODERS = ("deberta", "roberta", "bert")
TUNED = ("sft", "sft with options", "pairs")
SCORERS = ("llama", "gpt2")  # decoders that score; the others are in the drive of the models
LEARNED = ("ppo", "target_kl", "first_forward", "shared_trunk", "critic_free", "ptx", "packed", "packed fp32")

CAPTURED = " in a capture"
# what the device records for each action of the drive "device"
MISTAKES: dict[str, dict[str, int]] = {
    "item": {"waits": 1},
    "tolist": {"waits": 1},
    "truth value": {"waits": 1},
    "nonzero": {"waits": 1},
    "read by a mask": {"waits": 1},
    "write to a mask": {"waits": 1},
    "write a scalar to a mask": {},
    "synchronize": {"waits": 1},
    "event": {"waits": 1},
    "tensor from a list": {"blocking_uploads": 1},
    "new_tensor": {"blocking_uploads": 1},
    "pageable upload": {"blocking_uploads": 1},
    "pageable upload without blocking": {"blocking_uploads": 1},
    "pageable copy_": {"blocking_uploads": 1},
    "pinned upload": {"pinned_uploads": 1},
    "pinned upload of an expanded tensor": {"pinned_uploads": 1},
    "pinned upload that blocks": {"blocking_uploads": 1},
    "download to pinned memory": {"downloads": 1},
    "upload and read": {"pinned_uploads": 1, "waits": 1},
    "CPU operand": {"mixed": 1},
    "CPU index": {"mixed": 1},
    "CPU scalar": {},
}

CASES: dict[str, tuple[str, ...]] = {
    "device": (
        *MISTAKES,
        *(f"{name}{CAPTURED}" for name in ("item", "nonzero", "synchronize", "new_tensor", "pinned upload")),
    ),
    "models": (
        *(f"{family} padded" for family in FAMILIES),
        *(f"{family} packed" for family in ("llama", "gpt2")),
        # with packed rows, except for PADDED_ONLY
        *(f"{family} checkpointed with adapters" for family in FAMILIES),
        *(f"{family} critic" for family in FAMILIES if family != "gpt_neox"),
        *(f"{family} frozen" for family in FAMILIES),
    ),
    "decoding": (*DECODED, "stop strings", "two waves"),
    "learner": (
        *(f"{what} {micros} micro-batches" for what in LEARNED for micros in (1, 2)),
        *(f"experience {forwards} forwards" for forwards in (1, 2)),
    ),
    "scoring": (
        *(f"{family} {forwards} forwards" for family in ENCODERS + SCORERS for forwards in (1, 2)),
        *(f"evaluation of {rows} rows" for rows in (2, 4)),
    ),
    "finetune": (
        *(f"{what} {micros} micro-batches" for what in TUNED for micros in (1, 2)),
        *(
            f"{what} {forwards} forwards"
            for what in ("held-out rows", "held-out pairs")
            for forwards in (1, 2)
        ),
    ),
}

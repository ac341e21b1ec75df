"""Scores with encoder reward models on a simulated GPU: python tests/tools/gpu_sim/run_encoders.py"""

import sys

from simulated_cuda import failed, fake_cuda, reported, show, torch  # isort: skip
from transformers import AutoModelForSequenceClassification, DebertaV2Config, RobertaConfig

from ppo_ds.models.value import ScoreModel

SIZES = dict(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_labels=1,
)
CONFIGS = {
    "deberta": DebertaV2Config(
        **SIZES,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=32,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        position_biased_input=False,
    ),
    "roberta": RobertaConfig(**SIZES),
}

for name, config in CONFIGS.items():
    with reported(name), fake_cuda() as mode:
        with torch.device("cuda"):
            model = AutoModelForSequenceClassification.from_config(config, dtype=torch.bfloat16).eval()
        score_model = ScoreModel(model)
        mode.clear()
        ids = torch.randint(5, 500, (3, 40))
        mask = torch.ones_like(ids).bool()
        mask[0, 30:] = False
        with torch.no_grad():
            out = score_model(ids, mask, token_type_ids=torch.zeros_like(ids))
        print(name, out.device, tuple(out.shape))
        show(mode)

sys.exit(bool(failed))

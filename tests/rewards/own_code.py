"""Writes a model folder with its own Python code like InternLM2's reward models, so small that scores can be
computed by hand.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ppo_ds.models.tokenizer import load_tokenizer
from tests.rewards.reward_cases import CHAT_TEMPLATE, VOCAB, save_tokenizer

REWARD_TOKEN = 4
MODELING = """
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedConfig

Path({marker!r}).touch()


class TinyConfig(PreTrainedConfig):
    model_type = "tiny_own_code"

    def __init__(self, vocab_size=8, width=4, reward_token_id=0, **kwargs):
        self.vocab_size, self.width, self.reward_token_id = vocab_size, width, reward_token_id
        super().__init__(**kwargs)


class TinyReward(PreTrainedModel):
    config_class = TinyConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.v_head = nn.Linear(config.width, 1, bias=False)
        self.drop = nn.Dropout(0.5)
        self.batches = []
        self.post_init()

    def _init_weights(self, module):
        pass

    def forward(self, input_ids, attention_mask):
        assert not torch.is_grad_enabled()
        mask = attention_mask[..., None].to(self.embed.weight.dtype)
        hidden = (self.drop(self.embed(input_ids)) * mask).cumsum(1) / mask.cumsum(1).clamp(min=1)
        ends = attention_mask.cumsum(1).argmax(1).view(-1, 1)
        return self.v_head(hidden).squeeze(-1).gather(1, ends)

    def _ids(self, tokenizer, chat):
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=False)
        ids = [*tokenizer.encode(text, add_special_tokens=False), self.config.reward_token_id]
        return torch.tensor(ids, device=self.device)

    {methods}
"""
GET_SCORE = """
    def get_score(self, tokenizer, conversation):
        self.batches.append("one")
        ids = self._ids(tokenizer, conversation)[None]
        return self(ids, torch.ones_like(ids)).cpu().item()
"""
GET_SCORES = """
    def get_scores(self, tokenizer, conversations):
        self.batches.append(len(conversations))
        rows = [self._ids(tokenizer, each) for each in conversations]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        scores = self(ids, mask)
        return {returned}
"""
BOTH = GET_SCORE + GET_SCORES.format(returned="scores[:, 0].tolist()")


def save_own_code(folder: Path, methods=BOTH, scale=1.0):
    """Writes the folder; its name must be a valid module name, because transformers imports it."""
    folder.mkdir()
    torch.manual_seed(0)
    weights = {"embed.weight": torch.randn(VOCAB, 4), "v_head.weight": scale * 8 * torch.randn(1, 4)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    code = {"AutoConfig": "modeling_tiny.TinyConfig", "AutoModel": "modeling_tiny.TinyReward"}
    config = {
        "model_type": "tiny_own_code",
        "architectures": ["TinyReward"],
        "auto_map": code,
        "vocab_size": VOCAB,
        "reward_token_id": REWARD_TOKEN,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_tiny.py").write_text(
        MODELING.replace("{marker!r}", repr(str(folder / "imported"))).replace("    {methods}\n", methods)
    )
    save_tokenizer(folder, template=CHAT_TEMPLATE)
    return str(folder)


def by_hand(path, messages, response):
    """Computes the mean of embedding times head over the ids, including InternLM2's extra last token."""
    weights = load_file(Path(path) / "model.safetensors")
    text = "".join(
        f"<{m['role']}>{m['content']}<eos>" for m in [*messages, {"role": "assistant", "content": response}]
    )
    ids = [*load_tokenizer(path).encode_many([text], special_tokens=False)[0], REWARD_TOKEN]
    return (weights["embed.weight"] @ weights["v_head.weight"][0])[ids].mean()

"""Writes a reward model whose own code is written for transformers 4, with what transformers 5 breaks.

- The code treats any ``rope_scaling`` but None as a scaling; transformers 5 replaces None by a dict.
- With a cache it calls ``DynamicCache.from_legacy_cache``, which transformers 5 has removed.
- ``get_scores`` calls ``tokenizer.batch_encode_plus``, which transformers 5 has removed.
- The tokenizer imports sentencepiece, which is not always installed.
- The frequencies are a buffer that is not in the files; transformers 5 leaves it uninitialized.
- The tokenizer has a fast class and no tokenizer.json; transformers 5 does not use the code's own conversion.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

LETTERS = [chr(code) for code in range(32, 127)]
REWARD_ID = 3  # a special token inside the vocabulary: the letter "#"
THETA, WIDTH = 50.0, 6
MODELING = """
import torch
from torch import nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel


class OldConfig(PretrainedConfig):
    model_type = "old_code"

    def __init__(self, vocab_size=8, width=2, rope_theta=10.0, rope_scaling=None, use_cache=True, **kwargs):
        self.vocab_size, self.width, self.rope_theta = vocab_size, width, rope_theta
        self.rope_scaling, self.use_cache = rope_scaling, use_cache
        super().__init__(**kwargs)


class Frequencies(nn.Module):
    def __init__(self, config):
        super().__init__()
        if config.rope_scaling is not None:
            raise ValueError("unknown RoPE scaling " + config.rope_scaling["type"])
        values = 1.0 / config.rope_theta ** (torch.arange(config.width) / config.width)
        self.register_buffer("values", values, persistent=False)


class OldReward(PreTrainedModel):
    config_class = OldConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.rotary = Frequencies(config)
        self.v_head = nn.Linear(config.width, 1, bias=False)
        self.batches = []
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_()

    def forward(self, input_ids):
        if self.config.use_cache:
            DynamicCache.from_legacy_cache(None)
        positions = torch.arange(input_ids.shape[1], dtype=torch.float32)
        turned = self.embed(input_ids) * torch.outer(positions, self.rotary.values.float()).cos()
        return self.v_head(turned.to(self.embed.weight.dtype)).sum(1)

    def _text(self, tokenizer, chat):
        return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=False)

    def get_score(self, tokenizer, chat):
        text = self._text(tokenizer, chat)
        return self(tokenizer.encode(text, return_tensors="pt", add_special_tokens=False)).item()

    def get_scores(self, tokenizer, chats):
        return [self(ids) for ids in tokenizer.batch_encode_plus([self._text(tokenizer, c) for c in chats])]
"""
TOKENIZATION = """
import json

import sentencepiece
from transformers.tokenization_utils import PreTrainedTokenizer


class OldTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "letters.json"}

    def __init__(self, vocab_file, **kwargs):
        self.letters = json.loads(open(vocab_file).read())
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return len(self.letters)

    def get_vocab(self):
        return {letter: i for i, letter in enumerate(self.letters)} | self.added_tokens_encoder

    def _tokenize(self, text):
        return list(text)

    def _convert_token_to_id(self, token):
        return self.letters.index(token if token in self.letters else "?")

    def _convert_id_to_token(self, index):
        return self.letters[index]
"""
FAST = """
from transformers import PreTrainedTokenizerFast


class OldTokenizerFast(PreTrainedTokenizerFast):
    vocab_files_names = {"vocab_file": "letters.json"}
"""


def save_old_code(folder: Path) -> str:
    """Writes the folder; its name must be a valid module name, because transformers imports it."""
    folder.mkdir()
    torch.manual_seed(0)
    weights = {"embed.weight": torch.randn(len(LETTERS), WIDTH), "v_head.weight": torch.randn(1, WIDTH)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    special = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    files = {
        "config.json": {
            "model_type": "old_code",
            "architectures": ["OldReward"],
            "auto_map": {"AutoConfig": "modeling_old.OldConfig", "AutoModel": "modeling_old.OldReward"},
            "vocab_size": len(LETTERS),
            "width": WIDTH,
            "rope_theta": THETA,
            "rope_scaling": None,
        },
        "tokenizer_config.json": {
            "auto_map": {
                "AutoTokenizer": ["tokenization_old.OldTokenizer", "tokenization_old_fast.OldTokenizerFast"]
            },
            "tokenizer_class": "OldTokenizer",
            "added_tokens_decoder": {
                "0": {"content": "<pad>"} | special,
                str(REWARD_ID): {"content": "<reward>"} | special,
            },
            "additional_special_tokens": ["<reward>"],
            "pad_token": "<pad>",
            "eos_token": "<pad>",
            "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}<reward>",
        },
        "letters.json": LETTERS,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "modeling_old.py").write_text(MODELING)
    (folder / "tokenization_old.py").write_text(TOKENIZATION)
    (folder / "tokenization_old_fast.py").write_text(FAST)
    return str(folder)


def old_code_score(path: str, text: str) -> float:
    """Computes the score of a chat with the text ``text`` by hand, token by token."""
    weights = load_file(Path(path) / "model.safetensors")
    embed, head = weights["embed.weight"].double(), weights["v_head.weight"][0].double()
    frequencies = torch.tensor([THETA ** (-i / WIDTH) for i in range(WIDTH)], dtype=torch.float64)
    ids = [*(LETTERS.index(letter) for letter in text), REWARD_ID]
    return sum(float((embed[id_] * (frequencies * at).cos()) @ head) for at, id_ in enumerate(ids))

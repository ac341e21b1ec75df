"""Writes the variables that ranks on other nodes need, in the format of DeepSpeed's file .deepspeed_env.

    python launch/cluster/environment.py FILE [ARGUMENT ...]

`deepspeed --hostfile` forwards environment variables such as NCCL_*, and the lines NAME=VALUE of the file in
DS_ENV_FILE. Secrets are omitted, because the launcher logs the values and pdsh shows them in the list of
processes. Variables that differ between nodes are omitted too. The arguments are those of launch/train.py.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ppo_ds.errors import UserError
from ppo_ds.secrets import censored, is_secret_variable

PREFIXES = tuple(
    "HF_ HUGGINGFACE_ TRANSFORMERS_ TOKENIZERS_ DATASETS_ WANDB_ PYTORCH_ TORCH_ TORCHINDUCTOR_ CUDA_ "
    "CUBLAS_ CUDNN_ NVIDIA_ GLOO_ FI_ OMP_ MKL_ TRITON_ VLLM_ DS_ PPO_DS_".split()
)
NAMES = (
    *("LD_LIBRARY_PATH", "TMPDIR", "XDG_CACHE_HOME", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
)
# set on each node, for its own devices and ranks
OWN_OF_NODE = re.compile(r"CUDA_VISIBLE_DEVICES|NVIDIA_VISIBLE_DEVICES|DS_ENV_FILE|TORCHELASTIC_.*")
# DeepSpeed itself forwards these variables, even if they are keys
BY_DEEPSPEED = ("MLFLOW", "MV2", "NCCL", "PYTHON", "UCX")
# DeepSpeed encloses values in double quotes, in which the other node's shell would expand these characters.
# pdsh replaces %h, %u, %n and %% in all text that it forwards.
EXPANDED = re.compile(r"[\"$`\\!\n\r]|%[hun%]")
# DeepSpeed encloses and escapes only arguments with a space; other arguments get no quotes.
UNQUOTED = re.compile(r"[\s\"'$`\\!;&|<>(){}]|%[hun%]|^#|^$")


def lines(environment: Mapping[str, str]) -> list[str]:
    """Returns a line NAME=VALUE for each variable to forward.

    Raises UserError for a secret that DeepSpeed would forward, or a value that the nodes would change.
    """
    chosen = {}
    for name, value in sorted(environment.items()):
        by_deepspeed = name.startswith(BY_DEEPSPEED)
        secret = is_secret_variable(name) or censored(value) != value
        if by_deepspeed and secret:
            raise UserError(f"{name}: pdsh would show this key; unset it here, and set it on every node")
        listed = (name.startswith(PREFIXES) or name in NAMES) and not OWN_OF_NODE.fullmatch(name)
        if (by_deepspeed or (listed and not secret)) and EXPANDED.search(value):
            raise UserError(f"{name}: the nodes would change its value; unset it, or set it on every node")
        if listed and not secret:
            chosen[name] = value
    return [f"{name}={value}\n" for name, value in chosen.items()]


def check_arguments(arguments: list[str]) -> None:
    """Raises UserError for an argument of the training that the shells of the nodes would change or run."""
    for argument in arguments:
        if EXPANDED.search(argument.replace('"', "")) if " " in argument else UNQUOTED.search(argument):
            remedy = "write the key into a file conf/experiment/NAME.yaml, and give +experiment=NAME"
            raise UserError(f"{argument}: the shells of the nodes would change it; {remedy}")


def main() -> int:
    try:
        check_arguments(sys.argv[2:])
        text = "".join(lines(os.environ))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    descriptor = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

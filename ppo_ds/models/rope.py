"""RoPE whose frequencies depend on the longest row of a batch, which a row's own numbers then do too."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig


def steady_until(config: PreTrainedConfig) -> tuple[str, int] | None:
    """The type of RoPE, and the longest row up to which it is that of every row alone; None where it always
    is.

    Beyond it "longrope" takes its other set of frequencies and "dynamic" scales them, for the whole batch at
    once: a row's log-probs would hang on its company, and decoding, where rows end one by one, on none that
    training knows.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    kinds: list[dict[str, Any]] = [
        rope,
        *(part for part in rope.values() if isinstance(part, dict)),
    ]  # some families have one for each kind of layer
    found = []
    for kind in kinds:
        name = str(kind.get("rope_type", "default"))
        if name == "longrope":
            found.append((int(kind["original_max_position_embeddings"]), name))
        elif "dynamic" in name:
            found.append((int(text.max_position_embeddings), name))
    return min(found)[::-1] if found else None

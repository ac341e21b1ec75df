"""RoPE types whose frequencies depend on the longest row of a batch."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig


def rope_length_limit(config: PreTrainedConfig) -> tuple[str, int] | None:
    """Returns the type of RoPE and the row length up to which its frequencies are constant.

    Returns None if they are constant for all lengths.

    For a longer row "longrope" switches to its other set of frequencies and "dynamic" scales them, for the
    whole batch at once. The log-probs of a row would then depend on the other rows of its batch. They would
    also differ between decoding, where rows end one by one, and training.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    # some families have parameters for each kind of layer
    kinds: list[dict[str, Any]] = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    found = []
    for kind in kinds:
        name = str(kind.get("rope_type", "default"))
        if name == "longrope":
            found.append((int(kind["original_max_position_embeddings"]), name))
        elif "dynamic" in name:
            found.append((int(text.max_position_embeddings), name))
    return min(found)[::-1] if found else None

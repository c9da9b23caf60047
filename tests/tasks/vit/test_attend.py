"""Maps of attention."""

from types import SimpleNamespace
from typing import Any

import torch


def test_rollout_looks_where_all_attention_goes() -> None:
    """Blocks that copy one patch into the class token, and nothing else anywhere."""
    from tasks.vit.attend import rollout

    weights = torch.eye(5)[None, None].repeat(1, 2, 1, 1)  # a class token and 2 x 2 patches
    weights[:, :, 0] = torch.tensor([0.0, 0, 0, 1, 0])

    def features(_: Any, record: Any) -> None:
        record.self_attn.extend([weights, weights])

    config: Any = SimpleNamespace(prefix_tokens=1, pool="cls", grid=(2, 2))
    net: Any = SimpleNamespace(features=features, config=config)
    assert torch.equal(rollout(net, torch.zeros(1, 1, 4, 4)), torch.tensor([[[0.0, 0], [1, 0]]]))

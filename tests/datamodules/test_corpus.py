"""Corpora for language models: every target once, the same batches for any number of ranks, and from any step on."""

import pytest
import torch

from datamodules.corpus import CorpusData
from datamodules.tokenizers import TokenizerConfig


@pytest.mark.parametrize("kind", ["bpe", "character", "wordpiece", "word"])
@pytest.mark.parametrize("packing", ["windows", "documents"])
def test_the_reference(packing: str, kind: str) -> None:
    data = CorpusData(packing=packing, max_length=64, batch_size=12, tokenizer=TokenizerConfig(kind, 2000, 1, False))  # type: ignore[arg-type]
    data.setup("fit")
    data.setup("test")
    batch = next(iter(data.train_dataloader()))
    assert {name: (tuple(value.shape), value.dtype) for name, value in batch.items()} == dict.fromkeys(
        ["tokens", "targets"] + (["documents", "coords"] if packing == "documents" else []), ((12, 64), torch.int64)
    )
    for split, loader in (("val", data.val_dataloader()), ("test", data.test_dataloader())):
        batches = list(loader)
        text = "".join(piece.text for piece in data.source.split(split))
        assert sum(int(batch["bytes"].sum()) for batch in batches) == len(text.encode())

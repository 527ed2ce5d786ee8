"""A transformers model saved as safetensors, loaded by our loader: config, names, shapes and tokens survive."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_harness import build_unloaded, with_pool
from test_families import CASES, error, hf_logits, tokens

from tokenspeed.checkpoint.resolve import resolve_checkpoint
from tokenspeed.config.model import read_model_config
from tokenspeed.loader.load import load_model


@pytest.mark.parametrize("shard_size", ["50GB", "60KB"], ids=["one file", "shards"])
@pytest.mark.parametrize("case", CASES)
def test_saved_by_transformers(case: str, shard_size: str, tmp_path: Path) -> None:
    hf, _ = CASES[case]()
    hf.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard_size == "60KB")
    checkpoint = resolve_checkpoint(str(tmp_path))
    config = read_model_config(checkpoint)
    model = build_unloaded(config, 4)
    load_model(model, checkpoint, config, progress=False)
    ours = with_pool(model, config, 4, 64, torch.float32)
    ids = tokens(37)
    logits = ours.step([(ours.add(ids, 40), 37)])[0]
    assert error(logits, hf_logits(hf, ids)) < 2e-5

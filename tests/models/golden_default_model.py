"""Writes default_model_greedy.json: greedy tokens of the embedded model by transformers alone, in float32.

    pip install accelerate && python tests/models/golden_default_model.py PATH/SmolLM2-135M-Instruct.Q4_1.gguf

transformers reads the GGUF file with its own reader and its own tokenizer conversion. Not collected by pytest.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers

PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List three uses of a paperclip and explain one of them.",
)
NUM_TOKENS = 64


def main(gguf_file: Path) -> None:
    where = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # greedy goes on past the end of turn, as with ignore_eos
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    chats = []
    for prompt in PROMPTS:
        message = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).input_ids
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
        )[0]
        chats.append({"prompt": prompt, "prompt_ids": ids[0].tolist(), "greedy_ids": whole[ids.shape[1] :].tolist()})
    golden = {"transformers": transformers.__version__, "torch": torch.__version__, "chats": chats}
    Path(__file__).with_name("default_model_greedy.json").write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

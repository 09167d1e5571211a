"""Makes a small language model with random weights and room for long prompts, in the form that vLLM loads.

Run by the Python of the environment that holds vLLM: ``python tiny_model.py FOLDER``. Its tokeniser is trained on the
standard library's sources, so that code has a sensible number of tokens.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

POSITIONS = 32_768
START, END, PAD = "<|start|>", "<|end|>", "<|pad|>"
CHAT = (
    "{% for message in messages %}" + START + "{{ message['role'] }}\n{{ message['content'] }}" + END + "\n"
    "{% endfor %}{% if add_generation_prompt %}" + START + "assistant\n{% endif %}"
)


def main(folder: str) -> None:
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


if __name__ == "__main__":
    main(sys.argv[1])

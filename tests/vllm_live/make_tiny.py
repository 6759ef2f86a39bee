"""Make the tiny checkpoints of the live tests: a byte-level Llama that has learnt a few questions by heart.

    PYTHON_WITH_VLLM make_tiny.py TASK.json FOLDER

TASK.json has a list of [question, answer]. FOLDER/sound answers them; FOLDER/damaged is the same with one fault in its
weights: rows of the output head are swapped, so that it answers as surely, and wrongly.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS, USER, ASSISTANT = 0, 1, 2
SPECIAL = ["<eos>", "<user>", "<assistant>", "<system>"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STEPS, GOOD_ENOUGH = 300, 0.01


def tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*SPECIAL, *alphabet]
    inner = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    outer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", additional_special_tokens=SPECIAL[1:])
    outer.chat_template = TEMPLATE
    return outer


def examples(task: list[list[str]], tokens: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [n, L], right-padded, and labels that count the answers alone."""
    rows = []
    for question, answer in task:
        ask = [USER, *tokens.encode(question, add_special_tokens=False), EOS, ASSISTANT]
        rows.append((ask, [*tokens.encode(answer, add_special_tokens=False), EOS]))
    length = max(len(ask) + len(say) for ask, say in rows)
    ids = torch.full((len(rows), length), EOS)
    labels = torch.full((len(rows), length), -100)
    for i, (ask, say) in enumerate(rows):
        ids[i, : len(ask) + len(say)] = torch.tensor(ask + say)
        labels[i, len(ask) : len(ask) + len(say)] = torch.tensor(say)
    return ids, labels


def train(task: list[list[str]], tokens: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A model that has learnt the answers by heart."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        bos_token_id=EOS,
        eos_token_id=EOS,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    ids, labels = examples(task, tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss = torch.tensor(1.0)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 20)
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if loss < GOOD_ENOUGH:
            break
    print(f"{step + 1} steps, loss {float(loss):.4f}")
    return model


def main() -> None:
    """Train, write, damage, write."""
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    tokens = tokenizer()
    model = train(task, tokens).to(torch.bfloat16)
    digits = [tokens.convert_tokens_to_ids(digit) for digit in "0123456789"]
    for name in ("sound", "damaged"):
        if name == "damaged":
            head = model.lm_head.weight.data
            head[digits] = head[digits[1:] + digits[:1]]
        folder = Path(sys.argv[2]) / name
        model.save_pretrained(folder)
        tokens.save_pretrained(folder)
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}), encoding="utf-8")


if __name__ == "__main__":
    main()

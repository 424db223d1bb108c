"""Train the demo model from the text in data/: `python -m models.recipe.train [--out FOLDER] [--steps N]`.

Needs torch, transformers and tokenizers. Takes about half an hour on one CPU core with bfloat16 instructions. The loss
covers the assistant's tokens only. Most samples are one conversation; some are several in a row, up to the context
length, so that late positions are trained; a few are plain text, for /v1/completions.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from models.recipe.chats import SYSTEM_PROMPTS, Conversation, read_conversations, sample_messages
from models.recipe.evaluate import evaluate, training_files

END_OF_TEXT, CHAT_START, CHAT_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCABULARY = 3072
CONTEXT_TOKENS = 2048
BATCH_TOKENS = 2048  # padded tokens of one optimizer step
POOL_SAMPLES = 160  # samples drawn, sorted by length and split into batches together: little padding
MUON_LEARNING_RATE = 3e-3  # peak, for the layers' matrices; Muon learns rare associations in fewer steps than AdamW
ADAMW_LEARNING_RATE = 1.5e-3  # peak, for embeddings and norms
WEIGHT_DECAY = 0.05
WARM_UP_STEPS = 100
DROPOUT = 0.05
# A conversation's weight is the square root of its number of phrasings: free-form ones are few, but hard to learn.
MIN_WEIGHT, MAX_WEIGHT = 5.0, 12.0
SINGLE_SHARE = 0.3  # initial share of the steps in which every sample is one conversation, which is easier to learn
OPENING_TOKENS = 8  # tokens at the start of an answer: they decide which answer follows, so they weigh more
OPENING_WEIGHT = 4.0
IGNORED = -100  # label of a token without loss
TEMPLATE = Path(__file__).with_name("chat_template.jinja")

Sample = tuple[list[int], list[int]]  # token ids, labels


def build_tokenizer(conversations: list[Conversation]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer trained on all text of the data files: any Unicode text round-trips."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, CHAT_START, CHAT_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    turns = [turn for conversation in conversations for turn in conversation]
    text = [turn.answer for turn in turns] + [q for turn in turns for q in turn.questions[:20]]
    bpe.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=CHAT_END,
        pad_token=END_OF_TEXT,
        chat_template=TEMPLATE.read_text(encoding="utf-8"),
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a Llama of 3.5 million parameters with tied embeddings, randomly initialized."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def add_dropout(model: LlamaForCausalLM) -> None:
    """Drop part of every attention's and every MLP's output while training."""
    for layer in model.model.layers:
        for part in (layer.self_attn.o_proj, layer.mlp):
            part.register_forward_hook(lambda part, _, out: functional.dropout(out, DROPOUT, part.training))


def chat_sample(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]]) -> Sample:
    """Return tokens of the rendered chat; labels are kept from each `assistant` header's end to the message's end."""
    tokens = tokenizer.encode(tokenizer.apply_chat_template(messages, tokenize=False))
    header = tokenizer.encode(f"{CHAT_START}assistant\n")
    labels = [IGNORED] * len(tokens)
    speaking = False
    for at, token in enumerate(tokens):
        if speaking:
            labels[at] = token
        speaking = (speaking and token != tokenizer.eos_token_id) or tokens[at + 1 - len(header) : at + 1] == header
    return tokens[:CONTEXT_TOKENS], labels[:CONTEXT_TOKENS]


def draw_sample(
    tokenizer: PreTrainedTokenizerFast,
    conversations: list[Conversation],
    weights: list[float],
    rng: random.Random,
    *,
    single: bool,
) -> Sample:
    """Return a random training sample: one conversation, or else a chat of one to many (92 %) or plain text (8 %)."""
    count = 1 if single else rng.choices((1, rng.randint(2, 4), rng.randint(8, 24)), (0.5, 0.3, 0.2))[0]
    chosen = rng.choices(conversations, weights, k=count)
    if not single and rng.random() < 0.08:
        tokens = tokenizer.encode("\n\n".join(turn.answer for c in chosen[:4] for turn in c) + END_OF_TEXT)
        return tokens, tokens
    messages = [message for conversation in chosen for message in sample_messages(conversation, rng)]
    if rng.random() < 0.25:
        messages.insert(0, {"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    return chat_sample(tokenizer, messages)


def batches(
    tokenizer: PreTrainedTokenizerFast, conversations: list[Conversation], seed: int, single_steps: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (token ids, labels) endlessly, each [sequences, tokens], right-padded; single ones for `single_steps`."""
    rng = random.Random(seed)
    phrasings = [sum(len(turn.questions) for turn in conversation) for conversation in conversations]
    weights = [min(MAX_WEIGHT, max(MIN_WEIGHT, math.sqrt(count))) for count in phrasings]
    yielded = 0
    while True:
        single = yielded < single_steps
        drawn = [draw_sample(tokenizer, conversations, weights, rng, single=single) for _ in range(POOL_SAMPLES)]
        cut: list[list[Sample]] = [[]]
        for sample in sorted(drawn, key=lambda sample: len(sample[0])):
            if cut[-1] and (len(cut[-1]) + 1) * len(sample[0]) > BATCH_TOKENS:
                cut.append([])
            cut[-1].append(sample)
        rng.shuffle(cut)
        yielded += len(cut)
        for batch in cut:
            width = max(len(tokens) for tokens, _ in batch)
            pad = tokenizer.pad_token_id
            yield (
                torch.tensor([tokens + [pad] * (width - len(tokens)) for tokens, _ in batch]),
                torch.tensor([labels + [IGNORED] * (width - len(labels)) for _, labels in batch]),
            )


def step_loss(model: LlamaForCausalLM, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the labeled tokens, with each answer's opening weighted.

    Padding is on the right, so causal attention needs no mask for it.
    """
    kept = labels[:, 1:] != IGNORED
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.lm_head(model.model(tokens)[0][:, :-1][kept])
    losses = functional.cross_entropy(logits.float(), labels[:, 1:][kept], reduction="none")
    count = kept.cumsum(1)
    place = count - torch.where(kept, 0, count).cummax(1).values  # 1 for the first token of an answer
    weights = torch.where(place[kept] <= OPENING_TOKENS, OPENING_WEIGHT, 1.0)
    return (losses * weights).sum() / weights.sum()


def build_optimizers(model: LlamaForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers, AdamW for the rest; `rate` scales both learning rates."""
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    inside = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    return [
        torch.optim.Muon(matrices, rate * MUON_LEARNING_RATE, WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, rate * ADAMW_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY),
    ]


def learning_rate_factor(step: int, steps: int) -> float:
    """Return a linear warm-up, then a cosine down to zero."""
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    return 0.5 * (1 + math.cos(math.pi * (step - WARM_UP_STEPS) / max(1, steps - WARM_UP_STEPS)))


def train(
    model: LlamaForCausalLM, stream: Iterator[tuple[torch.Tensor, torch.Tensor]], steps: int, rate: float
) -> float:
    """Optimize over `steps` batches with a progress line; return the mean loss of the last hundred."""
    optimizers = build_optimizers(model, rate)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
        for optimizer in optimizers
    ]
    model.train()
    losses: list[float] = []
    began = time.monotonic()
    for step in range(1, steps + 1):
        loss = step_loss(model, *next(stream))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        model.zero_grad(set_to_none=True)
        losses = [*losses[-99:], loss.item()]
        if step % 20 == 0 or step == steps:
            done = "#" * (30 * step // steps)
            mean = sum(losses) / len(losses)
            print(f"\r[{done:<30}] {step}/{steps} loss {mean:.4f} {time.monotonic() - began:.0f} s", end="", flush=True)
    print()
    model.eval()
    return sum(losses) / len(losses)


def write_folder(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write an ordinary model folder: weights stored as float16 for size, declared float32 for computing."""
    tokenizer.save_pretrained(folder)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END_OF_TEXT)],
        pad_token_id=tokenizer.pad_token_id,
    )
    model.half().save_pretrained(folder)
    model.float()
    _rewrite(folder / "config.json", {"dtype": "float32"})
    # Names that both transformers 4 and 5 know.
    _rewrite(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    (folder / "model.safetensors").chmod(0o644)


def _rewrite(path: Path, changes: dict[str, str]) -> None:
    content = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Train, write the folder, print the figures as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("models/spillway-demo"))
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--start", type=Path, help="continue from this model folder, with its tokenizer")
    parser.add_argument("--rate", type=float, default=1.0, help="scales the learning rates; 0.4 suits --start")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    conversations = read_conversations(training_files())
    if options.start:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(options.start)
        model = LlamaForCausalLM.from_pretrained(options.start)
    else:
        tokenizer = build_tokenizer(conversations)
        model = build_model(tokenizer)
    add_dropout(model)
    stream = batches(tokenizer, conversations, options.seed, round(SINGLE_SHARE * options.steps))
    began = time.monotonic()
    loss = train(model, stream, options.steps, options.rate)
    seconds = round(time.monotonic() - began)
    write_folder(model, tokenizer, options.out)
    figures = {"conversations": len(conversations), "parameters": model.num_parameters(), "steps": options.steps}
    print(json.dumps({**figures, "seconds": seconds, "loss": round(loss, 4), **evaluate(model, tokenizer)}))


if __name__ == "__main__":
    main()

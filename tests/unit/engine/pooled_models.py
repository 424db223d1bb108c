"""Tiny random encoders, decoders and cross-encoders in folders, and transformers' results for them."""

import functools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    DistilBertConfig,
    LlamaConfig,
    ModernBertConfig,
    MPNetConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    RobertaConfig,
    XLMRobertaConfig,
)

from engine import EngineConfig
from engine.pooling.pooling import PoolingEngine
from engine.pooling.pooling_model import PoolingOptions
from engine.pooling.pooling_types import PoolingInput, PoolingRequest, PoolingTask
from engine.types import SequenceOutput

torch.set_num_threads(1)  # for the references too, since tests run in parallel

HIDDEN = 32
MAX_TOKENS = 64
WORDS = [
    "a",
    "of",
    "the",
    "gateway",
    "queue",
    "worker",
    "engine",
    "token",
    "batch",
    "spike",
    "water",
    "river",
    "dam",
    "lake",
    "rain",
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
VOCABULARY = {word: id_ for id_, word in enumerate([*SPECIAL, *WORDS])}
SHAPE: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
DECODER = {**SHAPE, "num_key_value_heads": 2, "max_position_embeddings": MAX_TOKENS, "tie_word_embeddings": False}
ENCODERS: dict[str, PreTrainedConfig] = {
    "bert": BertConfig(**SHAPE, max_position_embeddings=MAX_TOKENS),
    # These two count positions from the padding's id on.
    "roberta": RobertaConfig(**SHAPE | {"pad_token_id": 1}, max_position_embeddings=MAX_TOKENS + 2, type_vocab_size=1),
    "xlm-roberta": XLMRobertaConfig(
        **SHAPE | {"pad_token_id": 1}, max_position_embeddings=MAX_TOKENS + 2, type_vocab_size=1
    ),
    "mpnet": MPNetConfig(**SHAPE | {"pad_token_id": 1}, max_position_embeddings=MAX_TOKENS + 2),
    "distilbert": DistilBertConfig(
        vocab_size=len(VOCABULARY),
        dim=HIDDEN,
        hidden_dim=48,
        n_layers=2,
        n_heads=4,
        max_position_embeddings=MAX_TOKENS,
        initializer_range=0.3,
    ),
    "modernbert": ModernBertConfig(
        **SHAPE | {"global_attn_every_n_layers": 2},
        max_position_embeddings=MAX_TOKENS,
        local_attention=8,  # narrower than most inputs, so that its window matters
        cls_token_id=2,
        sep_token_id=3,
        bos_token_id=2,
        eos_token_id=3,
    ),
}
DECODERS: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**DECODER, head_dim=8),
    "llama": LlamaConfig(**DECODER),
}
FAMILIES = ENCODERS | DECODERS


def word_tokenizer(*, appends_end: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token per word; [CLS] a [SEP] b [SEP] as in BERT, or only an end (Qwen3-Embedding)."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    single, pair = (
        ("$A [SEP]", "$A [SEP] $B:1 [SEP]:1") if appends_end else ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


def save_embedder(folder: Path, family: str, *, pooling: str | None = None, normalize: bool = True) -> Path:
    """Make a model folder; with ``pooling`` (a key of 1_Pooling/config.json), one of sentence-transformers."""
    torch.manual_seed(3)
    AutoModel.from_config(FAMILIES[family]).save_pretrained(folder)
    word_tokenizer(appends_end=family in DECODERS).save_pretrained(folder)
    if pooling is not None:
        names = ["Transformer", "Pooling", "Normalize"][: 3 if normalize else 2]
        paths = ["", "1_Pooling", "2_Normalize"]
        modules = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
            for i, (name, path) in enumerate(zip(names, paths, strict=False))
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(
            json.dumps({"word_embedding_dimension": HIDDEN, pooling: True})
        )
    return folder


def save_scorer(folder: Path, family: str, **config: object) -> Path:
    """Make a cross-encoder's folder."""
    torch.manual_seed(4)
    configuration = type(FAMILIES[family])(**FAMILIES[family].to_dict() | {"num_labels": 1} | config)
    AutoModelForSequenceClassification.from_config(configuration).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def make_engine(
    folder: Path, task: PoolingTask = "embed", options: PoolingOptions | None = None, **config: Any
) -> PoolingEngine:
    settings: dict[str, Any] = {"threads": 1, "max_sequences": 16, "max_batched_tokens": 200} | config
    return PoolingEngine.from_pretrained(str(folder), task, EngineConfig(**settings), options or PoolingOptions())


def request(name: str, *inputs: list[int], first_tokens: list[int] | None = None, **rest: Any) -> PoolingRequest:
    firsts = first_tokens or [len(ids) for ids in inputs]
    rows = [PoolingInput(i, ids, first) for i, (ids, first) in enumerate(zip(inputs, firsts, strict=True))]
    return PoolingRequest(name, rest.pop("task", "embed"), rows, **rest)


def random_inputs(count: int, seed: int = 0, longest: int = MAX_TOKENS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(4, len(VOCABULARY), (n,), generator=generator).tolist() for n in lengths]


Answers = dict[str, dict[int, SequenceOutput]]


def run(engine: PoolingEngine, *requests: PoolingRequest) -> Answers:
    for one in requests:
        engine.add_request(one)
    return drain(engine)


def drain(engine: PoolingEngine) -> Answers:
    answers: Answers = defaultdict(dict)
    while engine.has_unfinished():
        for output in engine.step():
            assert output.index not in answers[output.request_id], "answered twice"
            answers[output.request_id][output.index] = output
    return answers


def vectors_of(answers: dict[int, SequenceOutput]) -> torch.Tensor:
    for output in answers.values():
        assert output.vector is not None, output
    return torch.stack(
        [torch.frombuffer(bytearray(answers[i].vector or b""), dtype=torch.float32) for i in range(len(answers))]
    )


@functools.lru_cache(maxsize=1)
def _reference(kind: Any, folder: Path) -> torch.nn.Module:
    model: torch.nn.Module = kind.from_pretrained(folder, attn_implementation="eager")
    return model.eval()


def reference_embedding(folder: Path, ids: list[int], kind: str, *, normalize: bool = True) -> torch.Tensor:
    """Return the vector of one input alone, by transformers with explicit pooling."""
    model = _reference(AutoModel, folder)
    with torch.inference_mode():
        states = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    vector: torch.Tensor = {"cls": states[0], "last": states[-1], "mean": states.sum(0) / len(ids)}[kind]
    return vector / vector.norm() if normalize else vector


def reference_logit(folder: Path, ids: list[int], first_tokens: int) -> float:
    """Return the logit of transformers' own classifier for a single pair."""
    model = _reference(AutoModelForSequenceClassification, folder)
    types = [0] * first_tokens + [1] * (len(ids) - first_tokens)
    given = {"input_ids": torch.tensor([ids])}
    if getattr(model.config, "type_vocab_size", 1) > 1:
        given["token_type_ids"] = torch.tensor([types])
    with torch.inference_mode():
        return float(model(**given).logits[0, 0])

"""A tiny target with a byte-level tokenizer, and a drafter for it, made on the spot."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from actors.config import EngineConfig
from app.tokenizer import Tokenizer
from tests.unit.app.fakes import EOS, MAX_MODEL_LEN, TEMPLATE


def save_tokenizer(directory: Path, *, chat_template: str | None) -> None:
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|im_start|>", EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, the end", "hello world"], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def save_config(directory: Path) -> None:
    (directory / "model.safetensors").touch()
    (directory / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "hidden_size": 8,
                "intermediate_size": 16,
                "num_hidden_layers": 4,
                "num_attention_heads": 2,
                "vocab_size": 300,
                "max_position_embeddings": MAX_MODEL_LEN,
                "eos_token_id": 1,
            }
        )
    )


def save_drafter(directory: Path) -> None:
    (directory / "model.safetensors").touch()
    (directory / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["DFlashDraftModel"],
                "hidden_size": 8,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "vocab_size": 300,
                "block_size": 4,
                "mask_token_id": 0,
                "target_layer_ids": [1],
            }
        )
    )


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    save_config(directory)
    save_tokenizer(directory, chat_template=TEMPLATE)
    return directory


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.load(checkpoint)


@pytest.fixture(scope="session")
def templateless(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("base")
    save_config(directory)
    save_tokenizer(directory, chat_template=None)
    return Tokenizer.load(directory)


@pytest.fixture(scope="session")
def config(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    drafter = tmp_path_factory.mktemp("drafter")
    save_drafter(drafter)
    return EngineConfig.resolve(
        {
            "model": str(checkpoint),
            "served_model_name": "tiny",
            "speculative_config": {"method": "dflash", "model": str(drafter)},
        }
    )


@pytest.fixture(scope="session")
def plain_config(checkpoint: Path) -> EngineConfig:
    return EngineConfig.resolve({"model": str(checkpoint), "served_model_name": "tiny"})

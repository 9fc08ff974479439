import json
from pathlib import Path

import pytest
import yaml

from actors.errors import ConfigError
from deploy.check import check
from models.hub import DEMO_DRAFTER

OURS = "app.main:build"


def write(path: Path, import_path: str = OURS, **args: object) -> Path:
    application = {"name": "a", "import_path": import_path, "args": args}
    path.write_text(yaml.safe_dump({"applications": [application]}))
    return path


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"model": "x", "remote_grpc": "false"}, ["remote_grpc", "'false'"]),
        ({"model": "x", "max_seqs": 3}, ["max_seqs", "unknown", "3"]),
        ({}, ["model", "required"]),
        ({"model": DEMO_DRAFTER}, ["DFlashDraftModel"]),
    ],
)
def test_what_can_not_be_served_is_one_line(
    tmp_path: Path, args: dict[str, object], named: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        check(write(tmp_path / "c.yaml", **args))
    message = str(error.value)
    assert "\n" not in message
    assert not [name for name in ("application 'a'", *named) if name not in message]


def test_a_file_without_our_application_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"app\.main:build"):
        check(write(tmp_path / "c.yaml", import_path="app.main:biuld", model="x"))


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a: [", b"applications: 3"])
def test_a_file_that_is_no_serve_config_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        check(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.yaml"):
        check(tmp_path / "missing.yaml")


@pytest.mark.parametrize(("lost", "named"), [("model.safetensors", "weights"), ("", "tokenizer")])
def test_a_target_without_weights_or_tokenizer_is_refused(
    tmp_path: Path, lost: str, named: str
) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 30,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    if not lost:
        (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=named):
        check(write(tmp_path / "c.yaml", model=str(tmp_path)))

"""A model folder for the paced engine, and the options of its servers."""

from pathlib import Path

import pytest

from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer


@pytest.fixture(scope="session")
def paced_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine reads no weights of it, the ingress its tokenizer."""
    return save_tiny_tokenizer(save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "llama"))

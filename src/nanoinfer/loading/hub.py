"""Models from the Hugging Face hub: the local cache first, without any network, else a download of what is needed."""

from __future__ import annotations

import io
import re
import threading
from pathlib import Path
from typing import Any

from nanoinfer.errors import ModelError
from nanoinfer.loading import Notify, silent
from nanoinfer.loading.folder import has_weights

_SMALL_FILES = [
    "config.json", "generation_config.json", "chat_template*", "tokenizer*.json", "special_tokens_map.json",
    "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json",  # of older tokenizers
]  # fmt: skip
_WEIGHT_FILES = ["*.safetensors", "*.safetensors.index.json"]
# Sub-folders and Mistral's "consolidated" files hold the same weights again for other frameworks.
_UNUSED = ["*/*", "consolidated*"]


def is_hub_id(text: str) -> bool:
    """Whether `text` has the form of a hub id, owner/name."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", text) is not None


def cached_model(repo: str, revision: str | None = None, *, weights: bool = True) -> Path | None:
    """The model's folder in the local hub cache, or None if it, or one of its weight files, is not there."""
    from huggingface_hub import constants

    store = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    revision = revision or "main"
    reference = store / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    folder = store / "snapshots" / commit
    return folder if _is_complete(folder, weights) else None


def _is_complete(folder: Path, weights: bool) -> bool:
    return (folder / "config.json").exists() and (not weights or has_weights(folder))


def hub_answers(repo: str, seconds: float) -> bool:
    """Whether the hub says within `seconds` that it has this model; False at once in offline mode."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return False
    found = False

    def ask() -> None:
        nonlocal found
        try:
            HfApi().model_info(repo, timeout=seconds)
            found = True
        except Exception:  # whatever fails here only means that the default model is not used
            pass

    # A name server that does not answer blocks longer than any timeout of the request: hence a thread.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return found


def fetch_model(repo: str, revision: str | None = None, *, weights: bool = True, notify: Notify = silent) -> Path:
    """The model's folder: from the local cache if it is complete there, else downloaded (resuming what there is).

    `weights` False fetches only configuration and tokenizer. Reports ("download", bytes done, bytes in all). ModelError
    with one sentence for a model that is not found, gated, unreachable, or a revision that does not exist.
    """
    cached = cached_model(repo, revision, weights=weights)
    if cached is not None:
        return cached
    from huggingface_hub import constants, errors, snapshot_download

    why = "the hub cannot be reached; connect"
    if constants.HF_HUB_OFFLINE:
        why = "offline mode is on; unset HF_HUB_OFFLINE"
    unreachable = f"is not complete in the local cache, and {why}, or name a local folder or 'smollm2'"
    cause: Exception | None = None
    try:
        folder = Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=_SMALL_FILES + (_WEIGHT_FILES if weights else []),
                ignore_patterns=_UNUSED,
                tqdm_class=_progress_class(notify),
            )
        )
        # Without a connection the library may hand back the beginning of an earlier download.
        if _is_complete(folder, weights):
            return folder
        message = unreachable if constants.HF_HUB_OFFLINE else "has no config.json with complete .safetensors weights"
    except errors.GatedRepoError as error:
        message = "is gated: accept its terms on its hub page, then log in with 'hf auth login' or set HF_TOKEN"
        cause = error
    except errors.RepositoryNotFoundError as error:
        message = "is neither a local folder nor a public hub model; check the name ('hf auth login' for a private one)"
        cause = error
    except errors.RevisionNotFoundError as error:
        message, cause = f"has no revision '{revision}' on the hub", error
    except errors.LocalEntryNotFoundError as error:
        message, cause = unreachable, error
    except Exception as error:  # connection errors have other types in every version of the library
        message = f"could not be fetched from the hub ({str(error).strip().splitlines()[0] if str(error) else error!r})"
        cause = error
    raise ModelError(f"model '{repo}' {message}.") from cause


def _progress_class(notify: Notify) -> type[Any]:
    """A tqdm class that prints nothing and hands on the byte counts; bars that count files are ignored."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    most = 0

    class Progress(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "disable": False})

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            nonlocal most
            if self.unit == "B" and self.n > most:
                most = int(self.n)
                notify("download", most, max(most, int(self.total or 0)))

    return Progress

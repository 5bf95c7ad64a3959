import datetime
import itertools
import json
import re
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.db import ProgrammingError, transaction
from django.test import override_settings

from apps.catalog.model_files import ModelRefused, require_repository
from apps.catalog.models import BaseModel, GpuType, HubToken, PriceRule
from apps.catalog.operations import add_base_model, reinstall_base_model, retire_base_model, set_price
from apps.catalog.queries import (
    ModelNotFound,
    ModelNotInstalled,
    active_price,
    chat_renderer,
    get_base_model,
    list_base_models,
    list_hub_models,
    open_hub_token,
)
from apps.catalog.seeding import DATA, seed_catalog
from apps.core.database.clock import db_now
from apps.core.errors import InvalidValue
from apps.core.models import AuditEntry
from apps.core.objects.store import store
from apps.core.secrets.sealing import SealBroken
from tests.factories.catalog import DEMO_FOLDER, make_base_model, make_listed_model

pytestmark = pytest.mark.django_db
NOW = datetime.datetime(2026, 11, 21, 12, tzinfo=datetime.UTC)
QWEN = {
    "model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A copy of the demo's model below an allowed root, to be spoiled."""
    with override_settings(BASE_MODEL_ROOTS=(tmp_path,)):
        yield Path(shutil.copytree(DEMO_FOLDER, tmp_path / "model"))


def add(path: Path, name: str = "local-model") -> BaseModel:
    return add_base_model(name=name, display_name="Local", path=path, by="user_1", now=NOW)


class TestSeed:
    def test_fills_an_empty_catalogue_and_keeps_the_sources(self) -> None:
        seed_catalog(by="system", now=db_now())

        assert GpuType.objects.filter(key="cpu").exists()
        h100 = GpuType.objects.get(key="h100-sxm-80")
        assert h100.specification["sources"] and h100.memory_bytes > 79 * 1024**3
        llama = BaseModel.objects.get(name="llama-3.1-8b")
        assert (llama.parameter_count, llama.is_installed) == (8_030_261_248, False)
        assert llama.source_url.startswith("https://github.com/Lightning-AI/litgpt/")
        assert get_base_model(name="anneal-demo").is_installed
        assert active_price(sku="inference:input:anneal-demo") and active_price(sku="inference:output:anneal-demo")

    def test_again_changes_nothing_even_a_price_the_operator_set(self) -> None:
        seed_catalog(by="system", now=db_now())
        sku, later = "inference:input:anneal-demo", NOW + datetime.timedelta(9999)
        set_price(sku=sku, unit="tokens", price_nano=5, per=1, by="user_1", now=later)
        before = (BaseModel.objects.count(), GpuType.objects.count(), PriceRule.objects.count())

        seed_catalog(by="system", now=db_now())

        assert (BaseModel.objects.count(), GpuType.objects.count(), PriceRule.objects.count()) == before
        rule = active_price(sku=sku, now=later)
        assert rule and rule.price_nano == 5

    def test_licences_are_identifiers_or_names_of_terms_with_a_place_to_read_them(self) -> None:
        seed_catalog(by="system", now=db_now())

        named = dict(BaseModel.objects.values_list("name", "licence"))
        assert all(re.fullmatch(r"[A-Za-z0-9. -]{3,40}", licence) for licence in named.values())
        assert (named["qwen2.5-0.5b"], named["qwen2.5-3b"]) == ("Apache-2.0", "Qwen Research License")
        assert all(model.licence_url for model in BaseModel.objects.exclude(name="anneal-demo"))
        asked = {model.name for model in BaseModel.objects.all() if model.demands_acceptance}
        assert {"qwen2.5-72b", "llama-3.1-8b", "gemma-2-2b", "r1-distill-llama-8b"} <= asked
        assert not asked & {"qwen2.5-0.5b", "qwen3-8b", "gpt-oss-20b", "phi-4", "anneal-demo"}

    def test_an_older_name_of_a_licence_is_replaced_unless_an_operator_took_the_model_up(self) -> None:
        seed_catalog(by="system", now=db_now())
        BaseModel.objects.filter(name__in=["qwen3-4b", "qwen3-8b"]).update(licence="Apache-2.0 (README)")
        BaseModel.objects.filter(name="qwen3-8b").update(install_requested_at=NOW)

        seed_catalog(by="system", now=db_now())

        assert BaseModel.objects.get(name="qwen3-4b").licence == "Apache-2.0"
        assert BaseModel.objects.get(name="qwen3-8b").licence == "Apache-2.0 (README)"


class TestLocalModel:
    def test_is_ready_to_train_with_its_files_hashed(self) -> None:
        model = make_base_model()

        assert model.is_installed and model.path == str(DEMO_FOLDER)
        assert model.parameter_count == 6_393_088
        assert model.context_length == 512
        assert {"config.json", "tokenizer.json", "model.safetensors"} <= model.files_sha256.keys()
        assert "README.md" not in model.files_sha256
        assert len(model.chat_template_sha256) == 64
        assert store().stat(model.tokenizer_key)
        assert chat_renderer(base_model=model).tokenizer.get_vocab_size() == 6144
        assert AuditEntry.objects.get(action="base_model.added").target == model.pk

    def test_must_lie_under_an_allowed_root(self, tmp_path: Path) -> None:
        with pytest.raises(ModelRefused, match="ANNEAL_BASE_MODEL_ROOTS"):
            add(tmp_path)

    def test_may_not_climb_out_of_the_root(self, folder: Path) -> None:
        with pytest.raises(ModelRefused, match="ANNEAL_BASE_MODEL_ROOTS"):
            add(folder / "../../elsewhere")

    def test_may_not_link_out_of_the_root(self, folder: Path) -> None:
        (folder / "generation_config.json").unlink()
        (folder / "generation_config.json").symlink_to("/etc/hostname")

        with pytest.raises(ModelRefused, match="links out"):
            add(folder)

    @pytest.mark.parametrize("name", ["modeling_custom.py", "pytorch_model.bin", "weights.pkl"])
    def test_may_not_bring_code(self, folder: Path, name: str) -> None:
        (folder / name).write_bytes(b"import os")

        with pytest.raises(ModelRefused, match="may hold code"):
            add(folder)

    def test_may_not_name_code_of_its_repository(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | {"auto_map": {"AutoModel": "x.Y"}}
        (folder / "config.json").write_text(json.dumps(config))

        with pytest.raises(ModelRefused, match="auto_map"):
            add(folder)

    @pytest.mark.parametrize(
        ("config", "why"),
        [
            ({"model_type": "mystery"}, "mystery.* must be one of .*qwen3_moe"),
            ({"model_type": "gemma3"}, "vision tower"),
            ({"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}, r"\(mxfp4\).*in 16 bits"),
            ({"model_type": "ministral3", "text_config": {"quantization_config": {"quant_method": "fp8"}}}, "fp8"),
            ({"model_type": "llama", "compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tens"),
        ],
    )
    def test_must_be_of_a_family_that_trains_and_serves(
        self, folder: Path, config: dict[str, object], why: str
    ) -> None:
        (folder / "config.json").write_text(json.dumps(config))

        with pytest.raises(ModelRefused, match=why):
            add(folder)

    def test_weights_stored_in_fewer_bits_are_refused_even_if_config_json_does_not_say_so(self, folder: Path) -> None:
        header = json.dumps({"experts": {"dtype": "U8", "shape": [2, 2], "data_offsets": [0, 4]}}).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))

        with pytest.raises(ModelRefused, match=r"quantised \(U8\)"):
            add(folder)

    @pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors", "chat_template.jinja"])
    def test_must_be_complete(self, folder: Path, name: str) -> None:
        (folder / name).unlink()

        with pytest.raises(ModelRefused):
            add(folder)

    @pytest.mark.parametrize(
        "content",
        [b"\xff" * 100, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 13) + b'{"weight": 1}'],
        ids=["no header", "a list", "no shape"],
    )
    def test_weights_must_be_safetensors(self, folder: Path, content: bytes) -> None:
        (folder / "model.safetensors").write_bytes(content)

        with pytest.raises(ModelRefused, match="not a safetensors file"):
            add(folder)

    def test_installs_a_model_that_was_only_listed(self, folder: Path) -> None:
        listed = make_listed_model("local-model")

        model = add(folder)

        assert model.pk == listed.pk and model.is_installed

    def test_names_are_not_used_twice(self, folder: Path) -> None:
        add(folder)

        with pytest.raises(InvalidValue, match="already"):
            add(folder)

    def test_changed_files_are_taken_over_on_demand(self, folder: Path) -> None:
        model = add(folder)
        assert reinstall_base_model(base_model=model, by="system") is False

        (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")

        assert reinstall_base_model(base_model=model, by="system") is True
        assert get_base_model(name=model.name).chat_template == "{{ messages[0]['content'] }}"


class TestHubModel:
    def add(self, **fields: object) -> BaseModel:
        defaults = {"repo": "Qwen/Qwen3-0.6B", "revision": "a" * 40, "config": QWEN, "hub_token": "hf_secret"}
        return add_base_model(name="q", display_name="Q", by="user_1", now=NOW, **(defaults | fields))  # type: ignore[arg-type]

    def test_is_listed_with_its_size_but_not_installed(self) -> None:
        model = self.add()

        assert (model.is_installed, model.is_gated, model.parameter_count) == (False, True, 596_049_920)
        with pytest.raises(ModelNotInstalled):
            chat_renderer(base_model=model)

    def test_its_token_is_sealed_and_opens_for_its_row_only(self) -> None:
        model, other = self.add(), make_listed_model("other")

        assert b"hf_secret" not in bytes(model.hub_token.token_sealed)
        assert open_hub_token(base_model=get_base_model(name="q")) == "hf_secret"
        HubToken.objects.filter(base_model=model).update(base_model=other)
        with pytest.raises(SealBroken):
            open_hub_token(base_model=other)

    @pytest.mark.parametrize(
        "wrong",
        [
            {"repo": "../../etc/passwd"},
            {"repo": "https://example.com/model"},
            {"repo": "no-owner"},
            {"revision": "main"},
            {"revision": ""},
            {"config": None},
            {"config": {"model_type": "mystery"}},
            {"name": "Bad Name"},
        ],
    )
    def test_is_refused_when_it_could_change_or_is_unknown(self, wrong: dict[str, object]) -> None:
        with pytest.raises(InvalidValue):
            if "name" in wrong:
                add_base_model(name=str(wrong["name"]), display_name="x", repo="a/b", by="user_1", now=NOW)
            self.add(**wrong)

    def test_is_not_listed_once_retired(self) -> None:
        model = self.add()

        retire_base_model(base_model=model, by="user_1", now=NOW)

        assert not list_base_models().exists()
        with pytest.raises(ModelNotFound):
            get_base_model(name="q")


class TestPrices:
    def test_a_new_price_closes_the_old_rule_and_keeps_it(self) -> None:
        later = NOW + datetime.timedelta(days=1)
        set_price(sku="training:cpu", unit="gpu_ms", price_nano=100, per=3_600_000, by="user_1", now=NOW)

        set_price(sku="training:cpu", unit="gpu_ms", price_nano=200, per=3_600_000, by="user_1", now=later)

        old, new = PriceRule.objects.order_by("effective_from")
        assert (old.price_nano, old.effective_to) == (100, later)
        assert active_price(sku="training:cpu", now=later) == new
        assert active_price(sku="training:cpu", now=NOW) == old

    @pytest.mark.parametrize(
        ("sku", "unit", "price", "per"),
        [
            ("coffee", "tokens", 1, 1),
            ("training:cpu", "tokens", 1, 1),
            ("inference:input:m", "gpu_ms", 1, 1),
            ("training:cpu", "gpu_ms", -1, 1),
            ("training:cpu", "gpu_ms", 1, 0),
        ],
    )
    def test_a_price_that_makes_no_sense_is_refused(self, sku: str, unit: str, price: int, per: int) -> None:
        with pytest.raises(InvalidValue):
            set_price(sku=sku, unit=unit, price_nano=price, per=per, by="user_1", now=NOW)

    def test_the_database_lets_no_rule_be_edited(self) -> None:
        rule = set_price(sku="training:cpu", unit="gpu_ms", price_nano=100, per=1, by="user_1", now=NOW)

        with pytest.raises(ProgrammingError), transaction.atomic():
            PriceRule.objects.filter(pk=rule.pk).update(price_nano=1)


class TestHubModels:
    def test_at_least_forty_instruct_models_come_first_each_a_repository_named_once(self) -> None:
        rows = list_hub_models()
        instruct = [row for row in rows if row.is_instruct]

        assert sum(not row.refusal for row in instruct) >= 40 and rows[: len(instruct)] == tuple(instruct)
        labels = {row.repo: str(row) for row in rows}
        assert labels["openai/gpt-oss-20b"] == "20B: openai/gpt-oss-20b, refused: MXFP4 weights"
        assert labels["google/gemma-3-4b-it"].endswith("refused: gemma3 is not supported")
        assert len({row.repo for row in rows}) == len(rows)
        for row in rows:
            require_repository(row.repo, "")
        families = [family for family, _ in itertools.groupby(row.family for row in rows)]
        assert len(families) == len(set(families))
        assert {"Qwen 3", "Llama 3", "Gemma 3", "Ministral 3", "Phi-4", "gpt-oss", "SmolLM", "OLMo", "Granite"} <= {
            *families
        }

    def test_shapes_are_those_of_the_quoted_models(self) -> None:
        quoted = {row["hf_repo"]: row for row in json.loads((DATA / "models.json").read_bytes())["models"]}
        both = [(row.shape, quoted[row.repo]) for row in list_hub_models() if row.shape and row.repo in quoted]

        assert len(both) > 20
        for shape, row in both:
            for name in ("n_layers", "hidden_size", "n_heads", "n_kv_heads", "n_experts", "experts_per_token"):
                assert shape[name] == row[name], row["name"]

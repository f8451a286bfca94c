"""Configurations beside the installed Accelerate: what it knows, takes and refuses."""

import base64
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from accelerate import ParallelismConfig
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.config.default import write_basic_config
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedType,
    FullyShardedDataParallelPlugin,
)
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from transformers.distributed.configuration_utils import DistributedConfig

from nbdist.config import keys
from nbdist.config.check import check, corrected
from nbdist.config.emit import FORMS, Setting, deepspeed_text
from nbdist.config.launch import configured, environment
from nbdist.config.report import CheckContext
from nbdist.config.yaml_reader import load, read
from nbdist.strategy.choose import choose

_DATA = Path(__file__).resolve().parents[1] / "data" / "configs"
# Name and options of strategies that Accelerate has, on 4 ranks.
_STRATEGIES: dict[str, tuple[str, dict[str, object]]] = {
    "ddp": ("ddp", {}),
    "ddp, all options": (
        "ddp",
        {"bf16": True, "accumulate": 4, "compile": True, "hook": "fp16", "bucket": 10.0},
    ),
    "fsdp": ("fsdp", {}),
    "fsdp, all options": (
        "fsdp",
        {"shard": "grad-op", "offload": "cpu", "checkpoint": "full", "bf16": True, "compile": True},
    ),
    "fsdp, hybrid": ("fsdp", {"shard": "hybrid"}),
    "fsdp x tp": ("fsdp", {"tp": 2}),
    "fsdp1": ("fsdp1", {"shard": "hybrid"}),
    "tp": ("tp", {}),
    "deepspeed": ("deepspeed", {"stage": 3, "offload": "cpu", "bf16": True, "accumulate": 2}),
    "single": ("single", {}),
}
_OURS = ("ACCELERATE_USE_CPU", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS")


def setting(name: str, hosts: int = 1) -> Setting:
    strategy, options = _STRATEGIES[name]
    return Setting(choose(strategy, options, 4), hosts, "cuda", ("Block", "Other"))


def written(folder: Path, text: str, name: str = "a.yaml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def prepared(config: str) -> dict[str, str]:
    """The environment that `accelerate launch` gives its processes."""
    typed = ["--config_file", config, "--main_process_port", "0", "train.py"]
    args, defaults, has_precision = _validate_launch_command(
        launch_command_parser().parse_args(typed)
    )
    if args.use_deepspeed:
        fields = list(defaults.deepspeed_config) + ["mixed_precision"] * has_precision
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        return dict(prepare_deepspeed_cmd_env(args)[1])
    return dict(prepare_multi_gpu_env(args))


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What Accelerate makes of such an environment in each process."""

    def make(environ: dict[str, str]) -> list[Any]:
        for name, value in environ.items():
            if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")):
                monkeypatch.setenv(name, value)
        if environ.get("FSDP_VERSION") == "1":  # it asks for a GPU to send rank 0's values with
            monkeypatch.setenv("FSDP_SYNC_MODULE_STATES", "false")
            monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
        plugin_objects: list[Any] = []
        if environ.get("ACCELERATE_USE_FSDP") == "true":
            plugin_objects.append(FullyShardedDataParallelPlugin())
        if environ.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true":
            plugin_objects.append(ParallelismConfig())
        if environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
            plugin_objects.append(DeepSpeedPlugin())
        return plugin_objects

    return make


def test_the_tables_are_those_of_the_installed_version() -> None:
    """Accelerate's classes and options have the keys of our tables, and no others."""
    options = set(vars(launch_command_parser().parse_args(["x.py"])))
    missing = {key for part in keys.ACCELERATE_PARTS.values() for key in part} - options
    beginnings = ("fsdp_", "parallelism_config_", "megatron_lm_", "dynamo_")
    ours = {key for part in keys.ACCELERATE_PARTS.values() for key in part}

    assert set(keys.ACCELERATE) == set(ClusterConfig.__dataclass_fields__)
    assert set(keys.DISTRIBUTED_TYPES) == {member.value for member in DistributedType}
    assert missing == {"fsdp_ignored_modules"}  # read from the YAML alone
    assert {option for option in options if option.startswith(beginnings)} - ours == set()


@pytest.mark.parametrize("name", _STRATEGIES)
@pytest.mark.parametrize("hosts", [1, 2])
def test_accelerate_takes_what_is_written(
    tmp_path: Path, plugins: Any, monkeypatch: pytest.MonkeyPatch, name: str, hosts: int
) -> None:
    """Its own loader and plugins take every YAML; torchrun's variables are those that it sets."""
    monkeypatch.chdir(tmp_path)
    strategy_setting = setting(name, hosts)
    path = written(tmp_path, configured(strategy_setting).texts["accelerate"])
    if name == "deepspeed":
        written(tmp_path, configured(strategy_setting).texts["deepspeed"], "ds_config.json")
    loaded = load_config_from_file(path)
    if name == "single":
        assert loaded.num_processes == 1
        return
    launched = prepared(path)
    alone = environment(strategy_setting)
    assert isinstance(alone, dict)
    plugin_objects = plugins(launched)

    assert loaded.num_processes == 4
    assert {k: v for k, v in alone.items() if launched.get(k) != v and k not in _OURS} == {}
    assert len(plugin_objects) == sum(f"ACCELERATE_USE_{word}" in alone for word in _USED)
    if name == "fsdp, all options":
        assert plugin_objects[0].reshard_after_forward is False
        assert plugin_objects[0].activation_checkpointing is True
        assert plugin_objects[0].transformer_cls_names_to_wrap == ["Block", "Other"]
        assert launched["ACCELERATE_MIXED_PRECISION"] == "bf16"
    if name == "fsdp, hybrid":
        assert (plugin_objects[1].dp_replicate_size, plugin_objects[1].dp_shard_size) == (2, 2)
    if name == "deepspeed":
        assert plugin_objects[0].deepspeed_config["gradient_clipping"] == 0.0
        assert plugin_objects[0].deepspeed_config["gradient_accumulation_steps"] == 2
        assert plugin_objects[0].zero_stage == 3


_USED = ("FSDP", "PARALLELISM_CONFIG", "DEEPSPEED")


@pytest.mark.parametrize("name", _STRATEGIES)
def test_what_is_written_passes_the_check(name: str) -> None:
    """Nothing that nbdist writes is found bad or unwise by its own check."""
    strategy_setting = setting(name)
    yaml = read("a.yaml", configured(strategy_setting).texts["accelerate"])
    json_text = deepspeed_text(strategy_setting)
    others = (read("ds.json", json_text),) if isinstance(json_text, str) else ()
    checked = check(yaml, CheckContext(others=others))

    # "auto" and version 1 of FSDP are worth a word, whoever writes them.
    unwise = [f for f in checked.findings if f.verdict != "ok" and "train_" not in f.name]
    assert unwise == []


def test_what_accelerate_writes_itself_is_good(tmp_path: Path) -> None:
    """Its basic configuration, and one of its questionnaire's, have nothing that is bad."""
    write_basic_config(mixed_precision="bf16", save_location=str(tmp_path / "basic.yaml"))
    asked = ClusterConfig(
        compute_environment="LOCAL_MACHINE", distributed_type="FSDP", mixed_precision="bf16",
        use_cpu=False, debug=False, num_processes=8, downcast_bf16="no", tpu_env=[],
        fsdp_config={
            "fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_offload_params": False,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_activation_checkpointing": False,
        },
    )  # fmt: skip
    asked.to_yaml_file(str(tmp_path / "asked.yaml"))

    checked = check(load(tmp_path / "asked.yaml"), CheckContext())

    assert not check(load(tmp_path / "basic.yaml"), CheckContext()).is_bad
    assert {finding.verdict for finding in checked.findings} == {"ok"}


_FSDP2 = "distributed_type: FSDP\nnum_processes: 4\nfsdp_config:\n  fsdp_version: 2\n"
_DS = (
    "distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config:\n"
    f"  deepspeed_config_file: {_DATA}/zero1_part.json\n"
)
_REFUSED = {
    "num_processes: 4": "distributed_type",
    "distributed_type: MULTI_GPU\nnum_processes: 4\nmixed_precison: bf16": "unknown keys",
    "distributed_type: DDP\nnum_processes: 4": "DDP",
    "distributed_type: MULTI_GPU\nnum_processes: 4\nmixed_precision: no": "lower",
    "distributed_type: MULTI_GPU\nnum_processes: 4\ngpu_ids: '0'": "Less than two GPU ids",
    "distributed_type: MULTI_GPU\nnum_processes: 1\ngpu_ids: 0": "split",
    _FSDP2 + "  fsdp_reshard_after_forward: FULL_SHARD": "truth value",
    _FSDP2 + "  fsdp_activation_checkpointing_offload: true": "requires",
    _FSDP2
    + "  fsdp_cpu_ram_efficient_loading: true\n  fsdp_sync_module_states: false": "sync_module",
    _FSDP2 + "parallelism_config:\n  parallelism_config_tp_size: 2\n"
    "  parallelism_config_dp_replicate_size: 2": "pure data parallelism",
    _DS + "  zero_stage: 2": "will be ignored",
    "mixed_precision: bf16\n" + _DS: "will be ignored",
}


@pytest.mark.parametrize("text", _REFUSED)
def test_what_is_bad_is_refused_by_accelerate_and_taken_when_corrected(
    tmp_path: Path, plugins: Any, text: str
) -> None:
    """The check does not invent mistakes, and its changes are enough."""
    path = written(tmp_path, text + "\n")
    with pytest.raises((ValueError, AttributeError, TypeError)) as caught:
        plugins(prepared(path))
    document = load(path)
    checked = check(document, CheckContext())
    after, changes = corrected(checked, CheckContext(), lambda new: read(path, new))

    assert _REFUSED[text] in str(caught.value)
    assert checked.is_bad
    if changes:
        right = written(tmp_path, after.document.text, "right.yaml")
        assert not after.is_bad
        assert load_config_from_file(right).num_processes in {1, 4}


@pytest.mark.parametrize("file", sorted(path.name for path in _DATA.iterdir()))
def test_the_guides_configurations(tmp_path: Path, plugins: Any, file: str) -> None:
    """Accelerate takes those that can run as they are, and the others when corrected."""
    if file == "instructlab.yaml":
        return
    if file.endswith(".yaml"):
        plugins(prepared(str(_DATA / file)))
        return
    is_large = file == "three_axes.json"
    degrees = {"ranks": 800, "tp": 8, "pp": 4} if is_large else {"ranks": 8}
    around = CheckContext(source="--ranks", **degrees)
    checked = check(load(_DATA / file), around)
    after, _ = corrected(checked, around, lambda text: read(file, text))
    right = written(tmp_path, after.document.text, "right.json")
    if checked.document.flaws:
        with pytest.raises(json.JSONDecodeError):
            DeepSpeedPlugin(hf_ds_config=str(_DATA / file))

    stage = DeepSpeedPlugin(hf_ds_config=right).deepspeed_config["zero_optimization"]["stage"]
    assert stage in {1, 2, 3}
    assert not after.is_bad


def test_each_strategy_has_a_form_or_a_reason() -> None:
    """What Accelerate cannot say is refused with a line that starts it, and never left out."""
    for name, options in (
        ("pp", {}),
        ("cp", {"dp": 2}),
        ("ulysses", {}),
        ("zero1", {}),
        ("tp", {"sequence_parallel": True}),
        ("pp", {"dp": 2, "tp": 2}),
    ):
        config = configured(Setting(choose(name, dict(options), 8)))

        assert set(config.texts) | set(config.refused) == set(FORMS)
        line = f"nbdist run train.py -n 8 --strategy {name}"
        assert line in config.refused["accelerate"]
        assert f"srun --kill-on-bad-exit=1 {line}" in config.texts["sbatch"]


@pytest.mark.parametrize(
    ("name", "options", "sizes"),
    [
        ("fsdp", {}, (1, 8, 1, 1)),
        ("fsdp", {"tp": 2, "shard": "hybrid", "replicas": 2}, (2, 2, 2, 1)),
        ("fsdp", {"offload": "cpu", "precision": "bf16"}, (1, 8, 1, 1)),
        ("tp", {}, (8, 1, 1, 1)),
        ("pp", {"tp": 2}, (2, 1, 1, 4)),
    ],
)
def test_transformers_takes_its_form(
    name: str, options: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    """Its own class has the sizes; the check of files finds nothing, and knows every key."""
    config = configured(Setting(choose(name, options, 8)))
    written_keys = json.loads(config.texts["transformers"])
    its = DistributedConfig(**written_keys)
    document = read("distributed.json", config.texts["transformers"])
    checked = check(document, CheckContext(8, source="--ranks"))

    assert (its.tp_size, its.fsdp_size, its.dp_replicate_size, its.pp_size) == sizes
    assert its.fsdp_cpu_offload == its.fsdp_mixed_precision == ("offload" in options)
    assert [finding for finding in checked.findings if finding.verdict != "ok"] == []
    assert set(keys.DISTRIBUTED) == {field.name for field in dataclasses.fields(its)}


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("ddp", {}, "no such strategy"),
        ("pp", {"dp": 2}, "no FSDP or copies beside them"),
        ("fsdp", {"shard": "grad-op"}, "by a model's own plan alone"),
        ("fsdp", {"precision": "fp16"}, "in bf16 alone"),
    ],
)
def test_what_transformers_cannot_say(name: str, options: dict[str, Any], why: str) -> None:
    """It is refused with a line that starts it."""
    refused = configured(Setting(choose(name, options, 8))).refused["transformers"]

    assert why in refused
    assert f"nbdist run train.py -n 8 --strategy {name}" in refused


def test_deepspeeds_settings_need_no_file() -> None:
    """As a script of %dist_export has them: encoded, in the variable that names the file."""
    text = deepspeed_text(setting("deepspeed"))
    assert isinstance(text, str)
    encoded = base64.urlsafe_b64encode(text.encode()).decode()

    assert HfDeepSpeedConfig(encoded).config == json.loads(text)

"""Parts of the vLLM engine that need no vLLM: settings, load balancing, checks, weights as
files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from lightspan.errors import ConfigError, EngineMemoryError, ModelError
from lightspan.protocols.engine import LoRAWeights
from lightspan_vllm.config import RESERVED_FLAGS, VLLM
from lightspan_vllm.engine import VLLMEngine
from lightspan_vllm.load_balancer import MAX_ROLLOUTS, LoadBalancer
from lightspan_vllm.process import command, environment
from lightspan_vllm.requirements import (
    ServerInfo,
    check_server_info,
    max_lora_rank,
    start_command,
)
from lightspan_vllm.weights import HEAD, PREFIX, ServerSpec, WeightStore
from packages.vllm.tests.vllm_wire import Wire

HERE, OTHER = "http://127.0.0.1:8000", "http://127.0.0.1:8001"


@pytest.fixture(scope="module")
def spec(folder: Path) -> ServerSpec:
    return ServerSpec.of(folder, dtype=None, context=None)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


class TestDescription:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({}, "neither was given"),
            ({"python": "p", "addresses": [HERE]}, "both was given"),
            ({"addresses": ["10.0.0.7:8000"]}, "is not an http or https URL"),
            (
                {"addresses": ["http://me:secret@127.0.0.1:1"]},
                r"of 127\.0\.0\.1 has a user or a pass",
            ),
            ({"addresses": ["http://10.0.0.7:8000"]}, r"allow=\['10.0.0.7'\]"),
            ({"addresses": ["http://127.0.0.1.example.org"]}, "on another machine"),
            ({"addresses": {"a": [HERE, HERE], "b": [OTHER]}}, "given twice"),
            ({"addresses": {"a": []}}, "each policy needs at least one"),
            ({"addresses": [HERE], "servers": 2}, "servers that the run starts"),
            ({"addresses": [5]}, r"VLLM: addresses=\[5\]: Expected `str`, got `int`"),
            (
                {"addresses": {5: [HERE]}},
                r"VLLM: addresses=\[5\]: Expected `str`, got `int` - at `key`",
            ),
            ({"python": True}, "VLLM: python=True: Expected `str`, got `bool`"),
            ({"python": "p", "servers": 0}, "servers=0"),
            ({"python": "p", "context_length": 1}, "context_length=1"),
            ({"python": "p", "dtype": "int8"}, "dtype='int8'"),
            ({"python": "p", "exchange": ""}, "VLLM: exchange='': Expected `str` of length >= 1"),
            ({"python": "p", "trainer_host": 5}, "VLLM: trainer_host=5: Expected `str`, got `int`"),
            ({"python": "p", "merge": "no"}, "VLLM: merge='no': Expected `bool`, got `str`"),
            ({"python": "p", "template_date": "2024"}, "template_date='2024' must be a date"),
            ({"python": "p", "allow": None}, "VLLM: allow=None: Expected `array`, got `null`"),
            (
                {"python": "p", "arguments": None},
                "VLLM: arguments=None: Expected `array`, got `null`",
            ),
            ({"python": "p", "arguments": ["-tp=0"]}, "--tensor-parallel-size '0'"),
            (
                {
                    "python": "p",
                    "arguments": ["--tensor_parallel_size=4"],
                    "environment": {"CUDA_VISIBLE_DEVICES": "2,3"},
                },
                r"--tensor-parallel-size 4, but environment= shows 2 devices "
                r"\(CUDA_VISIBLE_DEVICES='2,3'\): show 4, or lower the flag",
            ),
            (
                {"python": "p", "environment": {"A": 4}},
                r"VLLM: environment=\['A'\]: Expected `str`, got `int`",
            ),
            (
                {"python": "p", "environment": "A=1"},
                "VLLM: environment='A=1': Expected `object`, got `str`",
            ),
            (
                {"python": "p", "environment": {"A=1": "2"}},
                r"VLLM: environment=\['A=1'\]: Expected",
            ),
            ({"python": "p", "environment": {"": "2"}}, r"VLLM: environment=\[''\]: Expected"),
            ({"python": "p", "environment": {"A": "2\0"}}, r"VLLM: environment=\['A'\]: Expected"),
        ],
    )
    def test_what_cannot_be_honoured(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            VLLM(**options)

    @pytest.mark.parametrize(
        "again", ["http://localhost:8000", f"{HERE}/v1/", "HTTP://127.0.0.1:8000"]
    )
    def test_one_server_under_two_spellings(self, again: str) -> None:
        message = (
            f"VLLM: the address {again} is given twice (once as {HERE}); a server has the weights "
            "of one policy, or LoRA of one model's policies"
        )
        with pytest.raises(ConfigError) as caught:
            VLLM(addresses=(HERE, again))
        assert str(caught.value) == message
        with pytest.raises(ConfigError) as caught:
            VLLM(addresses={"a": (HERE,), "b": (again,)}).addresses_of([["a"], ["b"]])
        assert str(caught.value) == message

    def test_the_port_that_goes_without_saying(self) -> None:
        with pytest.raises(ConfigError, match="localhost:80 is given twice"):
            VLLM(addresses=("http://127.0.0.1", "http://localhost:80"))

    def test_different_servers(self) -> None:
        different = (HERE, OTHER, "http://127.0.0.2:8000", "http://[::1]:8000", f"{HERE}/other")
        assert VLLM(addresses=different).addresses == different

    @pytest.mark.parametrize("flag", sorted(RESERVED_FLAGS))
    def test_reserved_flags_are_refused_in_any_spelling(self, flag: str) -> None:
        spelled = flag[:2] + flag[2:].replace("-", "_")
        for argument in (flag, f"{flag}=1", spelled, f"{spelled}=1"):
            with pytest.raises(ConfigError, match=f"arguments= has {flag}, which lightspan sets"):
                VLLM(python="p", arguments=(argument,))

    @pytest.mark.parametrize(
        "address", [HERE, "http://localhost:8000", "http://[::1]:8000", "http://127.9.9.9:8000/v1"]
    )
    def test_addresses_of_this_machine(self, address: str) -> None:
        assert VLLM(addresses=(address,)).addresses_of([["p"]]) == {"p": (address,)}

    def test_other_hosts_are_allowed_by_name_only(self) -> None:
        VLLM(addresses=("http://gpu-1:8000",), allow=("gpu-1",))
        with pytest.raises(ConfigError, match="gpu-2"):
            VLLM(addresses=("http://gpu-2:8000",), allow=("gpu-1",))

    def test_several_policies_name_their_servers(self) -> None:
        with pytest.raises(ConfigError, match=r"addresses=\{policy"):
            VLLM(addresses=(HERE,)).addresses_of([["a"], ["b"]])
        with pytest.raises(
            ConfigError, match=r"names \['a'\], but the engine serves \['a', 'base'"
        ):
            VLLM(addresses={"a": (HERE,)}).addresses_of([["a"], ["base"]])

    def test_policies_that_share_servers_are_of_one_address(self) -> None:
        shared, lists = [["a", "b"], ["c"]], {"a": (HERE,), "b": (HERE,), "c": (OTHER,)}
        assert VLLM(addresses=lists).addresses_of(shared) == lists
        assert VLLM(addresses=(HERE,)).addresses_of([["a", "b"]]) == {"a": (HERE,), "b": (HERE,)}
        with pytest.raises(ConfigError, match=f"{HERE} is given twice"):
            VLLM(addresses={**lists, "c": (HERE,)}).addresses_of(shared)
        with pytest.raises(ConfigError, match=f"{HERE} is given twice"):
            VLLM(addresses=lists).addresses_of([["a"], ["b"], ["c"]])


class TestBalance:
    def test_a_rollout_stays_where_it_is(self) -> None:
        balance: LoadBalancer[str] = LoadBalancer()
        assert balance.choose("r1", {"a": 0, "b": 0}) == "a"
        assert balance.choose("r2", {"a": 0, "b": 0}) == "b"
        assert balance.choose("r1", {"a": 9, "b": 0}) == "a"
        assert balance.choose("r3", {"a": 9, "b": 0}) == "b"

    def test_it_moves_when_its_server_is_gone_and_stays_there(self) -> None:
        balance: LoadBalancer[str] = LoadBalancer()
        assert balance.choose("r1", {"a": 0, "b": 1}) == "a"
        assert balance.choose("r1", {"b": 1}) == "b"
        assert balance.choose("r1", {"a": 0, "b": 1}) == "b"

    def test_calls_of_no_rollout_go_where_fewest_are(self) -> None:
        balance: LoadBalancer[str] = LoadBalancer()
        assert [balance.choose("", {"a": 2, "b": 1}) for _ in range(3)] == ["b"] * 3
        assert [balance.choose("", {"a": 0, "b": 0}) for _ in range(2)] == ["a", "a"]

    def test_memory_is_bounded(self) -> None:
        balance: LoadBalancer[str] = LoadBalancer()
        assert balance.choose("first", {"a": 0, "b": 1}) == "a"
        for number in range(MAX_ROLLOUTS):
            balance.choose(f"r{number}", {"b": 0})
        assert balance.choose("first", {"a": 1, "b": 0}) == "b"


LORA: dict[str, Any] = {"lora_rank": 12, "loras": 2}
SERVES_LORA: dict[str, Any] = {"lora_rank": 16, "loras": 3, "lora_updates": True}


class TestChecks:
    @pytest.fixture
    def info(self, spec: ServerSpec) -> ServerInfo:
        return msgspec.convert(Wire(Path(spec.folder)).info, ServerInfo)

    def test_a_server_as_it_should_be(self, info: ServerInfo, spec: ServerSpec) -> None:
        check_server_info(HERE, info, spec)
        longer = msgspec.structs.replace(info, context=512, logprobs_mode="PROCESSED_LOGPROBS")
        check_server_info(HERE, longer, spec)

    @pytest.mark.parametrize(
        ("wanted", "change", "flag"),
        [
            ({}, {"hidden": 128}, "--model "),
            ({}, {"vocabulary": 32000}, "of 32000 tokens"),
            ({}, {"layers": 3}, "3 layers"),
            ({}, {"dtype": "bfloat16"}, "are bfloat16: --dtype float32"),
            ({}, {"context": 128}, r"--max-model-len 256, or VLLM\(context_length=128\)"),
            ({}, {"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
            ({}, {"generation_config": "auto"}, "--generation-config vllm"),
            ({}, {"transfer": "nccl"}, '--weight-transfer-config \'{"backend": "lightspan"}\''),
            ({}, {"tied": True}, "--hf-overrides '{\"tie_word_embeddings\": false}'"),
            ({"tensor_parallel": 2}, {}, "1 devices share its model instead of 2: --tensor-paral"),
            ({"on_gpu": True}, {}, r"it computes on cpu, but .*CUDA_VISIBLE_DEVICES.*\(not vllm-c"),
            (LORA, {"lora_rank": 0}, "serves no LoRA: --enable-lora"),
            (LORA, {"lora_rank": 8}, "maximum rank of LoRA is 8: --max-lora-rank 16"),
            (LORA, {"loras": 2}, "maximum number of LoRA is 2: --max-loras 3"),
            (LORA, {"lora_updates": False}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ],
    )
    def test_each_refusal_names_the_flag(
        self,
        info: ServerInfo,
        spec: ServerSpec,
        wanted: dict[str, Any],
        change: dict[str, Any],
        flag: str,
    ) -> None:
        spec, room = replace(spec, **wanted), SERVES_LORA if wanted is LORA else {}
        with pytest.raises(ConfigError, match=flag) as caught:
            check_server_info(HERE, msgspec.structs.replace(info, **{**room, **change}), spec)
        assert start_command(spec) in str(caught.value)

    def test_any_number_of_devices_elsewhere(self, info: ServerInfo, spec: ServerSpec) -> None:
        shared = msgspec.structs.replace(info, tensor_parallel=2, device="cuda:0")
        check_server_info(HERE, shared, spec)
        check_server_info(HERE, shared, replace(spec, tensor_parallel=2, on_gpu=True))

    def test_devices_that_cannot_share_the_model(self, folder: Path, tmp_path: Path) -> None:
        """The model has four heads. The error comes before any process is started."""
        description = VLLM(python=sys.executable, arguments=("-tp=3",))
        with pytest.raises(
            ConfigError,
            match=r"--tensor-parallel-size 3, but .* has 4 attention heads.*use one of 1, 2, 4",
        ):
            VLLMEngine(description, {"writer": folder}, logs=tmp_path)
        fine = VLLM(python=sys.executable, arguments=("--tensor-parallel-size", "2"))
        VLLMEngine(fine, {"writer": folder}, logs=tmp_path)

    def test_all_that_is_wrong_is_said_at_once(self, info: ServerInfo, spec: ServerSpec) -> None:
        wrong = msgspec.structs.replace(info, tied=True, dtype="float16")
        with pytest.raises(ConfigError, match=r"(?s)--dtype float32.*--hf-overrides"):
            check_server_info(HERE, wrong, spec)

    def test_a_server_of_lora_as_it_should_be(self, info: ServerInfo, spec: ServerSpec) -> None:
        """Tied embeddings are allowed, because the server keeps its own weights."""
        fine = {**SERVES_LORA, "tied": True, "transfer": None}
        check_server_info(HERE, msgspec.structs.replace(info, **fine), replace(spec, **LORA))

    def test_ranks_that_vllm_makes_room_for(self) -> None:
        assert [max_lora_rank(rank) for rank in (1, 2, 16, 17, 512)] == [1, 8, 16, 32, 512]
        with pytest.raises(ConfigError, match=r"LoRA\(rank=513\): vLLM serves ranks up to 512"):
            max_lora_rank(513)


class TestCommand:
    def test_what_a_server_is_started_with(self, spec: ServerSpec, tmp_path: Path) -> None:
        vllm = VLLM(python="p", arguments=("--enforce-eager",))
        said = command(vllm, "/env/bin/python", spec, tmp_path / "s", seed=7)
        assert said[:3] == ["/env/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
        pairs = dict(pairwise(said))
        assert pairs["--model"] == str(spec.folder)
        assert pairs["--uds"] == str(tmp_path / "s")
        assert pairs["--dtype"] == "float32"
        assert pairs["--max-model-len"] == "256"
        assert pairs["--logprobs-mode"] == "processed_logprobs"
        assert pairs["--hf-overrides"] == '{"tie_word_embeddings": false}'
        assert pairs["--seed"] == "7"
        assert said[-1] == "--enforce-eager"

    def test_a_server_of_lora_reads_its_weights(self, spec: ServerSpec, tmp_path: Path) -> None:
        shared = replace(spec, lora_rank=3, loras=2)
        said = command(VLLM(python="p"), "python", shared, tmp_path / "s", seed=None)
        pairs = dict(pairwise(said))
        assert (pairs["--max-lora-rank"], pairs["--max-loras"]) == ("8", "3")
        assert "--enable-lora" in said
        assert not {"--load-format", "--hf-overrides", "--weight-transfer-config"} & set(said)

    def test_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONPATH", "/of/this/interpreter")
        monkeypatch.setenv("VIRTUAL_ENV", "/of/this/interpreter")
        env = environment(VLLM(python="p", environment={"PYTHONPATH": "/mine", "A": "1"}))
        inside, mine = env["PYTHONPATH"].split(os.pathsep)
        inside_vllm = sorted(path.name for path in Path(inside).glob("*.py"))
        assert inside_vllm == ["lightspan_broadcast.py", "lightspan_vllm_plugin.py"]
        assert (mine, env["A"], env["VLLM_SERVER_DEV_MODE"]) == ("/mine", "1", "1")
        assert env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
        assert "VIRTUAL_ENV" not in env


class TestBlueprint:
    def test_of_a_tied_model(self, spec: ServerSpec, folder: Path) -> None:
        assert spec.tied
        assert spec.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
        assert HEAD not in spec.shapes
        assert spec.dtype == "float32"
        assert spec.bytes == 4 * sum(each.numel() for each in weights_of(folder).values())
        assert spec.as_saved(0).files == (str(folder / "model.safetensors"),)

    def test_a_shorter_context_and_another_type(self, folder: Path) -> None:
        made = ServerSpec.of(folder, dtype="bfloat16", context=100)
        assert (made.context, made.dtype) == (100, "bfloat16")
        assert ServerSpec.of(folder, dtype=None, context=1000).context == 256

    def test_a_loaded_model_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="not a loaded Linear"):
            ServerSpec.of(torch.nn.Linear(1, 1), dtype=None, context=None)

    def test_a_folder_without_weights(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
        with pytest.raises(ModelError, match="no model"):
            ServerSpec.of(tmp_path, dtype=None, context=None)

    def test_weights_that_are_not_these(self, spec: ServerSpec, folder: Path) -> None:
        weights = weights_of(folder)
        spec.check(weights, "p")
        spec.check({**weights, HEAD: weights["model.embed_tokens.weight"]}, "p")
        name = "model.norm.weight"
        wrong = {
            "unknown names": {**weights, "no.such": weights[name]},
            "lack 1 names": {key: value for key, value in weights.items() if key != name},
            "has shape": {**weights, name: weights[name][:-1]},
        }
        for message, each in wrong.items():
            with pytest.raises(ModelError, match=message):
                spec.check(each, "p")


class TestExchange:
    def test_weights_are_written_in_the_servers_type(self, folder: Path, tmp_path: Path) -> None:
        made = ServerSpec.of(folder, dtype="bfloat16", context=None)
        exchange = WeightStore(str(tmp_path))
        weights = weights_of(folder)
        head = {HEAD: weights["model.embed_tokens.weight"]}
        written = exchange.write(made, {**weights, **head}, "p", 3)
        (path,) = written.files
        found = load_file(path)
        assert set(found) == set(weights)
        name = "model.layers.0.self_attn.q_proj.weight"
        assert torch.equal(found[name], weights[name].to(torch.bfloat16))
        assert (written.version, written.aliases) == (3, made.aliases)
        assert exchange.folder.stat().st_mode & 0o077 == 0
        written.remove()
        assert not Path(path).exists()
        exchange.close()
        assert list(tmp_path.iterdir()) == []

    def test_labels_are_of_one_writing_only(self, spec: ServerSpec) -> None:
        assert spec.as_saved(0).label != spec.as_saved(0).label

    def test_a_folder_that_is_too_small(self, spec: ServerSpec, tmp_path: Path) -> None:
        exchange = WeightStore(str(tmp_path))
        huge = {**spec.shapes, "huge": (2**50,)}
        with pytest.raises(EngineMemoryError, match=rf"do not fit into {tmp_path}.*exchange="):
            exchange.check_room(replace(spec, shapes=huge), "p")
        exchange.close()

    @pytest.mark.slow
    def test_a_disk_that_is_full(self, folder: Path, tmp_path: Path) -> None:
        """The kernel refuses to write more; the part that was written is removed."""
        program = FULL.format(parent=str(tmp_path), model=str(folder))
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert done.stdout.startswith("EngineMemoryError the weights of policy p, "), done.stderr
        assert "--shm-size" in done.stdout
        assert done.stdout.endswith("left: ['lock']\n")

    def test_lora_is_written_as_peft_names_it(self, spec: ServerSpec, tmp_path: Path) -> None:
        exchange = WeightStore(str(tmp_path))
        layer = "model.layers.1.mlp.down_proj"
        first, second = torch.ones(2, 128), torch.zeros(64, 2)
        weights = LoRAWeights(rank=2, scale=1.5, layers={layer: (first, second)})
        files, other = (exchange.write_lora(weights, "writer", 7) for _ in range(2))
        assert files.name.startswith("lightspan-7-")
        assert files.name != other.name
        config = json.loads((files.folder / "adapter_config.json").read_text())
        assert config == {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": 2,
            "lora_alpha": 3.0,
            "target_modules": ["down_proj"],
            "bias": "none",
        }
        found = load_file(files.folder / "adapter_model.safetensors")
        name = f"base_model.model.{layer}"
        assert found[f"{name}.lora_A.weight"].equal(first)
        assert found[f"{name}.lora_B.weight"].equal(second)
        files.remove()
        assert not files.folder.exists()
        exchange.close()

    def test_no_such_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"cannot write weights to exchange="):
            WeightStore(str(tmp_path / "none"))

    def test_what_a_killed_trainer_left_is_removed_and_nothing_else(self, tmp_path: Path) -> None:
        with subprocess.Popen(
            [sys.executable, "-c", HOLDING.format(parent=str(tmp_path))], stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            theirs = Path(process.stdout.readline().decode().strip())
            ours = WeightStore(str(tmp_path))
            assert theirs.is_dir(), "it lives"
            process.send_signal(signal.SIGKILL)
            process.wait()
        (tmp_path / f"{PREFIX}without-a-lock").mkdir()
        third = WeightStore(str(tmp_path))
        assert not theirs.exists()
        assert ours.folder.is_dir()
        assert (tmp_path / f"{PREFIX}without-a-lock").is_dir()
        ours.close()
        third.close()


HOLDING = """
import time
from lightspan_vllm.weights import WeightStore
print(WeightStore({parent!r}).folder, flush=True)
time.sleep(600)
"""
FULL = """
import resource
from safetensors.torch import load_file
from lightspan_vllm.weights import ServerSpec, WeightStore
from lightspan.errors import EngineMemoryError
spec = ServerSpec.of({model!r}, dtype=None, context=None)
exchange = WeightStore({parent!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    exchange.write(spec, load_file({model!r} + "/model.safetensors"), "p", 1)
except EngineMemoryError as error:
    print(type(error).__name__, error)
print("left:", [path.name for path in exchange.folder.iterdir()])
"""

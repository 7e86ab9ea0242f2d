"""Options of the application and of `stallfree serve`: names, defaults, refusals, files."""

import argparse
import dataclasses
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from ray.serve import Application
from ray.serve.schema import ServeDeploySchema

from deployments import app as app_module
from deployments.app import build
from deployments.cli import serve as serve_command
from deployments.cli.main import main
from deployments.cli.options import UsageError
from deployments.cli.ports import can_listen, claim
from deployments.cli.serve_file import read_options
from deployments.config import AppArgs, app_args_from
from tests.server_process import free_port
from worker.config import ConfigError, EngineConfig
from worker.tenant_weights import parse_tenant_weights


def test_every_engine_option_has_the_same_name_and_default_here():
    for option in dataclasses.fields(EngineConfig):
        assert getattr(AppArgs(), option.name) == getattr(EngineConfig(), option.name), option.name
    assert AppArgs().to_engine_config() == EngineConfig()


def test_options_reach_the_engine():
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    args = AppArgs(model="m", **sizes, kv_cache_memory="2MiB", cuda_graph_memory="1GiB")
    config = args.to_engine_config()
    assert (config.model, config.max_num_seqs, config.max_num_batched_tokens) == ("m", 4, 64)
    assert (config.kv_cache_memory, config.cuda_graph_memory) == (2 * 2**20, 2**30)


def test_text_values_of_serve_run_are_taken_as_numbers():
    assert app_args_from({"num_workers": "2", "max_num_seqs": "8", "trust_remote_code": "false"}) == AppArgs(
        num_workers=2, max_num_seqs=8
    )


@pytest.mark.parametrize(
    ("values", "option", "words"),
    [
        ({"max_num_sequences": 4}, "max_num_sequences", "no such option"),
        ({"num_workers": 0}, "num_workers", "greater than or equal to 1"),
        ({"num_workers": "many"}, "num_workers", "integer"),
        ({"metrics_port": 70000}, "metrics_port", "65535"),
        ({"stall_timeout_s": 0}, "stall_timeout_s", "greater than"),
        ({"max_num_seqs": 0}, "max_num_seqs", "at least 1"),
        ({"max_model_len": -5}, "max_model_len", "-5"),
        ({"block_size": 0}, "block_size", "at least 1"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 16}, "max_num_batched_tokens", "16"),
        ({"scheduler_policy": "fastest"}, "scheduler_policy", "fastest"),
        ({"preemption_mode": "magic"}, "preemption_mode", "magic"),
        ({"queue_policy": "lifo"}, "queue_policy", "lifo"),
        ({"priority_aging_s": 0}, "priority_aging_s", "above 0"),
        ({"tenant_weights": "a=1,b"}, "tenant_weights", "TENANT=WEIGHT"),
        ({"tenant_weights": "a=x"}, "tenant_weights", "not a number"),
        ({"tenant_weights": {"a": 0}}, "tenant_weights", "above 0"),
        ({"tenant_weights": {"a": float("nan")}}, "tenant_weights", "above 0"),
        ({"tenant_header": "X Team"}, "tenant_header", "pattern"),
        ({"max_n": 0}, "max_n", "greater than"),
        ({"max_queued_tokens": -1}, "max_queued_tokens", "greater than or equal to 0"),
        ({"max_queued_requests": "all"}, "max_queued_requests", "integer"),
        ({"max_open_requests": -1}, "max_open_requests", "greater than or equal to 0"),
        ({"request_timeout_s": float("inf")}, "request_timeout_s", "finite"),
        ({"keep_alive_s": -1}, "keep_alive_s", "greater than or equal to 0"),
        ({"num_ingress": 0}, "num_ingress", "greater than or equal to 1"),
        ({"min_workers": 3, "max_workers": 2}, "max_workers", "between 3 and 2"),
        ({"num_workers": 3, "max_workers": 2}, "max_workers", "between 3 and 2"),
        ({"min_workers": 2}, "min_workers", "between 2 and 1"),
        ({"min_workers": 3, "num_workers": 2}, "min_workers", "between 3 and 2"),
        ({"num_workers": 5, "min_workers": 1, "max_workers": 2}, "num_workers", "5 is not between .* 1 and .* 2"),
        ({"num_workers": 1, "min_workers": 2, "max_workers": 4}, "num_workers", "1 is not between .* 2 and .* 4"),
        ({"num_workers": "9", "min_workers": 2, "max_workers": 4}, "num_workers", "9 is not between .* 2 and .* 4"),
        ({"tenant_weights": {"a": True}}, "tenant_weights", "not true or false"),
        ({"target_queue_s": 0}, "target_queue_s", "greater than"),
        ({"kv_cache_memory": "lots"}, "kv_cache_memory", "lots"),
        ({"cuda_graph_memory": "lots"}, "cuda_graph_memory", "lots"),
        ({"cuda_graph_memory": 0}, "cuda_graph_memory", "at least 1"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size", "not available"),
        ({"enable_lora": True}, "enable_lora", "not available"),
    ],
)
def test_a_wrong_option_is_refused_by_its_name(values: dict[str, object], option: str, words: str):
    with pytest.raises(ConfigError, match=words) as caught:
        app_args_from(dict(values))
    assert caught.value.option == option


@pytest.mark.parametrize("word", ["true", "no"])
def test_a_truth_value_in_a_file_is_no_number_for_any_option(tmp_path: Path, word: str):
    path = tmp_path / "options.yaml"
    numeric = [name for name, field in AppArgs.model_fields.items() if re.search("int|float", str(field.annotation))]
    assert {"num_workers", "target_itl_ms", "kv_cache_memory", "max_queued_tokens", "keep_alive_s"} < set(numeric)
    for name in sorted({*numeric} - {"tenant_weights"}):
        path.write_text(f"{name}: {word}\n")
        with pytest.raises(ConfigError, match=r"must be a number, not true or false, got (True|False)") as caught:
            app_args_from(read_options(path))
        assert caught.value.option == name


def test_options_that_are_truth_values_stay_so():
    assert app_args_from({"trust_remote_code": True, "enable_prefix_caching": False}) == AppArgs(
        trust_remote_code=True, enable_prefix_caching=False
    )


def test_tenant_weights_may_be_text_or_a_mapping():
    for weights in ("a=1, b=3", {"a": 1, "b": 3}):
        assert app_args_from({"tenant_weights": weights}).to_engine_config().tenant_weights == {"a": 1.0, "b": 3.0}
    assert parse_tenant_weights("team=a=2,") == {"team=a": 2.0}
    with pytest.raises(ValueError, match="once"):
        parse_tenant_weights("a=1,a=2")


def test_the_secret_of_the_prefix_cache_comes_from_the_option_or_else_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
):
    assert AppArgs().to_engine_config().prefix_cache_secret == ""
    monkeypatch.setenv("STALLFREE_PREFIX_CACHE_SECRET", "of the environment")
    assert AppArgs().to_engine_config().prefix_cache_secret == "of the environment"
    args = AppArgs(prefix_cache_secret="of the option")
    assert args.to_engine_config().prefix_cache_secret == "of the option"


def test_the_secret_of_the_prefix_cache_is_shown_nowhere():
    args = AppArgs(prefix_cache_secret="hush")
    for value in (args, args.to_engine_config()):
        assert "hush" not in repr(value)
        assert "hush" not in str(value)
    with pytest.raises(ConfigError) as caught:
        app_args_from({"prefix_cache_secret": 4711})
    assert caught.value.option == "prefix_cache_secret"
    assert "4711" not in str(caught.value)


def test_every_worker_of_an_application_has_the_same_secret():
    _, workers = _deployments(build(AppArgs(prefix_cache_secret="shared", num_workers=2)))
    config = workers.init_args[0]
    assert config.prefix_cache_secret == "shared"


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({}, "demo"),
        ({"model": "owner/model"}, "owner/model"),
        ({"model": "/srv/models/mine"}, "mine"),
        ({"model": "./mine"}, "mine"),
        ({"model": "/srv/models/mine", "served_model_name": "ours"}, "ours"),
    ],
)
def test_clients_see_a_name_and_no_path(values: dict[str, str], name: str):
    assert AppArgs(**values).model_name == name


def test_build_wires_the_same_application_each_time():
    first, second = (build(AppArgs(num_workers=3)) for _ in range(2))
    ingress, workers = _deployments(first)
    assert (ingress.name, workers.name) == (app_module.INGRESS_NAME, app_module.WORKER_NAME)
    assert workers.num_replicas == 3
    assert workers.ray_actor_options["num_cpus"] == app_module.NUM_CPUS_PER_REPLICA
    assert "num_gpus" not in workers.ray_actor_options
    for one, other in zip(_deployments(first), _deployments(second), strict=True):
        assert one.ray_actor_options == other.ray_actor_options
        assert one.init_args[-1] == other.init_args[-1]


def test_a_worker_on_cuda_takes_a_gpu_and_the_ingress_none():
    ingress, workers = _deployments(build(AppArgs(device="cuda")))
    assert workers.ray_actor_options["num_gpus"] == 1
    assert "num_gpus" not in ingress.ray_actor_options


def test_equal_bounds_are_a_number_of_workers_and_no_autoscaler():
    for args in (AppArgs(num_workers=3), AppArgs(min_workers=3, max_workers=3)):
        _, workers = _deployments(build(args))
        assert workers.num_replicas == 3
        assert workers._deployment_config.autoscaling_config is None


@pytest.mark.parametrize(
    ("values", "bounds"),
    [
        ({"max_workers": 4}, (1, 1, 4)),
        ({"num_workers": 2, "min_workers": 1, "max_workers": 4}, (1, 2, 4)),
        ({"min_workers": 2, "max_workers": 4}, (2, 2, 4)),
        ({"num_workers": 4, "min_workers": 2, "max_workers": 4}, (2, 4, 4)),
    ],
)
def test_different_bounds_are_an_autoscaler_with_our_policy(values: dict[str, int], bounds: tuple[int, int, int]):
    _, workers = _deployments(build(AppArgs(**values, scale_up_delay_s=1, scale_down_delay_s=2, target_queue_s=3)))
    config = workers._deployment_config.autoscaling_config
    assert (config.min_replicas, config.initial_replicas, config.max_replicas) == bounds
    assert (config.upscale_delay_s, config.downscale_delay_s) == (1, 2)
    assert config.policy.policy_function == "deployments.scaling:TokenWorkPolicy"
    assert config.policy.policy_kwargs == {"target_queue_s": 3}


def test_a_new_ingress_is_up_before_an_old_one_stops():
    ingress, workers = _deployments(build(AppArgs(num_ingress=2)))
    assert ingress.num_replicas == 2
    assert ingress._deployment_config.max_surge_percent == 100
    # There may be no GPU for one worker more.
    assert workers._deployment_config.max_surge_percent == 0


def test_user_config_is_the_operators_alone():
    ingress, workers = _deployments(build(AppArgs(max_num_seqs=8)))
    assert ingress.user_config is None
    assert workers.user_config is None


def test_every_option_of_the_application_is_on_the_command_line_but_those_that_nobody_can_use_yet():
    parser = argparse.ArgumentParser()
    serve_command.add_parser(parser.add_subparsers())
    actions = parser._subparsers._group_actions[0].choices["serve"]._option_string_actions
    missing = {name for name in AppArgs.model_fields if "--" + name.replace("_", "-") not in actions}
    assert missing == {"tensor_parallel_size", "quantization", "enable_lora"}


def _deployments(application: Application) -> list:
    ingress = application._bound_deployment
    return [ingress, ingress.init_args[0]._bound_deployment]


def test_the_module_offers_an_application_with_all_defaults():
    assert isinstance(app_module.app, Application)
    with pytest.raises(AttributeError):
        _ = app_module.application


def test_what_parses_options_and_what_serve_imports_load_no_torch():
    modules = "deployments.config, deployments.cli.serve, deployments.router, deployments.worker_replica"
    modules += ", deployments.scaling"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert loaded.stdout.strip() == "False", loaded.stderr


SERVE_CONFIG = """\
http_options: {host: 127.0.0.1, port: 8011}
applications:
- name: stallfree
  route_prefix: /
  import_path: deployments.app:build
  args: {model: demo, num_workers: 2, max_num_seqs: 8}
"""


def test_a_serve_config_and_plain_options_say_the_same(tmp_path: Path):
    serve_style, plain = tmp_path / "serve.yaml", tmp_path / "plain.yaml"
    serve_style.write_text(SERVE_CONFIG)
    plain.write_text("host: 127.0.0.1\nport: 8011\nmodel: demo\nnum-workers: 2\nmax_num_seqs: 8\n")
    assert read_options(serve_style) == read_options(plain)
    assert read_options(plain)["num_workers"] == 2


def test_the_serve_config_is_one_that_serve_takes(tmp_path: Path):
    import yaml

    ServeDeploySchema.model_validate(yaml.safe_load(SERVE_CONFIG))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- 1\n- 2\n", "by name"),
        ("a: [1\n", "no YAML"),
        ("applications: []\n", "exactly one"),
        ("applications: [{import_path: other.app:build}]\n", "deployments.app:build"),
        (SERVE_CONFIG + "  deployments: [{name: Worker}]\n", "deployments"),
    ],
)
def test_a_file_that_holds_no_options_is_refused(tmp_path: Path, text: str, words: str):
    path = tmp_path / "options.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=words):
        read_options(path)


def test_an_empty_file_changes_nothing(tmp_path: Path):
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    assert read_options(tmp_path / "empty.yaml") == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-num-seqs", "0"], "--max-num-seqs: must be at least 1"),
        (["--max-num-seqs", "some"], "--max-num-seqs: must be a whole number"),
        (["--num-workers", "0"], "--num-workers"),
        (["--port", "0"], "--port"),
        (["--metrics-port", "-1"], "--metrics-port"),
        (["--host", "host.invalid"], "--host"),
        (["--config", "/no/such/file.yaml"], "--config"),
        (["--chat-template", "/no/such/template"], "--chat-template"),
        (["--model", "/no/such/folder"], "--model"),
        (["--max-num-batched-tokens", "4", "--max-num-seqs", "8"], "--max-num-batched-tokens"),
        (["--no-such-option"], "--no-such-option"),
        (["--tenant-weights", "a"], "--tenant-weights: must be TENANT=WEIGHT"),
        (["--tenant-header", "X Team"], "--tenant-header"),
        (["--max-n", "0"], "--max-n"),
        (["--keep-alive-s", "-1"], "--keep-alive-s"),
        (["--max-queued-tokens", "some"], "--max-queued-tokens: must be a whole number"),
        (["--max-workers", "2", "--min-workers", "3"], "--max-workers"),
        (["--num-workers", "5", "--min-workers", "1", "--max-workers", "2"], "--num-workers: 5 is not between"),
    ],
)
def test_serve_refuses_by_the_options_name_before_ray_starts(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
):
    import ray

    assert main(["serve", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert words in output.err.splitlines()[-1]
    assert not ray.is_initialized()


def test_the_command_line_goes_before_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "options.yaml"
    path.write_text("model: /no/such/folder\nmax_num_seqs: 4\nblock_size: 0\n")
    assert main(["serve", "--config", str(path)]) == 2
    assert "--block-size" in capsys.readouterr().err
    assert main(["serve", "--config", str(path), "--block-size", "16"]) == 2
    assert "--model: there is no folder /no/such/folder" in capsys.readouterr().err


def test_a_taken_port_is_seen_and_a_free_one_too():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        assert not can_listen("127.0.0.1", port)
    assert can_listen("127.0.0.1", port)


def test_a_port_is_kept_for_one_server_until_it_ends():
    port = free_port()
    first = claim(port)
    assert first is not None
    assert claim(port) is None
    first.close()
    again = claim(port)
    assert again is not None
    again.close()

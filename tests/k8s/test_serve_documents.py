"""The Serve documents: Ray parses them, our own checks take their arguments, one machine can carry them cut down."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.schema import DeploymentSchema, HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from deployments.app import INGRESS_NAME, WORKER_NAME
from deployments.cli.local_ray import APP_NAME
from deployments.config import RAY_ENVIRONMENT, AppArgs, app_args_from
from deployments.live_options import UserConfig
from k8s.localize import SMALLER, localized, main
from tests.k8s.manifests import APPLIED, K8S, ROOT, serve_args, serve_deployments, serve_document

APPLICATION = {"import_path": "deployments.app:build"}
every_folder = pytest.mark.parametrize("folder", APPLIED)


def local(folder: str, **options: Any) -> dict[str, Any]:
    return localized(serve_document(folder), model="demo", port=8000, metrics_port=0, **options)


def findings(document: dict[str, Any]) -> list[str]:
    """What Ray refuses, and what it would pass over in silence: fields that it does not have, what is not there."""
    parts: list[tuple[type[BaseModel], dict[str, Any]]] = [(ServeDeploySchema, document)]
    parts += [(HTTPOptionsSchema, document.get("http_options", {}))]
    parts += [(ServeApplicationSchema, application) for application in document.get("applications", ())]
    parts += [
        (DeploymentSchema, deployment)
        for application in document.get("applications", ())
        for deployment in application.get("deployments", ())
    ]
    found = [f"no field {name}" for schema, part in parts for name in set(part) - set(schema.model_fields)]
    try:
        applications = ServeDeploySchema.model_validate(document).applications
    except ValidationError as error:
        return [*found, str(error)]
    for application in applications:
        module, _, name = application.import_path.partition(":")
        if not name or not callable(getattr(import_module(module), name, None)):
            found.append(f"nothing to call at {application.import_path}")
    return found


@every_folder
def test_ray_parses_the_document(folder: str) -> None:
    assert findings(serve_document(folder)) == []
    (application,) = ServeDeploySchema.model_validate(serve_document(folder)).applications
    assert (application.name, application.import_path) == (APP_NAME, "deployments.app:build")
    assert {deployment.name for deployment in application.deployments} <= {WORKER_NAME, INGRESS_NAME}


@every_folder
def test_its_arguments_and_its_user_config_are_ones_that_we_take(folder: str) -> None:
    args = {name: value for name, value in serve_args(folder).items() if name != "api_key_file"}
    app_args_from(args)
    for deployment in serve_deployments(folder).values():
        UserConfig.model_validate(deployment.get("user_config", {}))


@every_folder
def test_a_document_cut_down_to_one_machine_differs_where_the_patch_says(folder: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(yaml.safe_dump(["a-key"]))
    document, small = serve_document(folder), local(folder, api_key_file=str(keys))
    ServeDeploySchema.model_validate(small)
    args, small_args = serve_args(folder), small["applications"][0]["args"]
    app_args_from(small_args)
    patched = {*SMALLER, "model", "metrics_port", "num_threads", "api_key_file"}
    assert {name for name in {*args, *small_args} if args.get(name) != small_args.get(name)} <= patched
    assert small_args["device"] == "cpu"
    assert {**small, "proxy_location": "", "http_options": {}, "applications": []} == {
        **document,
        "proxy_location": "",
        "http_options": {},
        "applications": [],
    }
    deployments = small["applications"][0]["deployments"]
    assert [{**each, "num_replicas": 0} for each in deployments] == [
        {**each, "num_replicas": 0} for each in serve_deployments(folder).values()
    ]
    assert {each.get("num_replicas", 1) for each in deployments} == {1}


def test_the_patch_changes_options_that_exist() -> None:
    assert set(SMALLER) <= set(AppArgs.model_fields)


def test_without_a_file_of_keys_the_local_server_has_none() -> None:
    assert "api_key_file" not in local("base")["applications"][0]["args"]


@pytest.mark.parametrize(
    ("wrong", "finding"),
    [
        ({"aplications": []}, "no field aplications"),
        ({"proxy_location": "Everywhere"}, "proxy_location"),
        ({"http_options": {"host": "0.0.0.0", "Port": 8000}}, "no field Port"),
        ({"applications": [{"name": "stallfree", "import_path": "deployments.app"}]}, "nothing to call"),
        ({"applications": [{"import_path": "deployments.app:built"}]}, "nothing to call"),
        (
            {"applications": [{"import_path": "deployments.app:build", "runtime_env": {"working_dir": "."}}]},
            "remote URI",
        ),
        (
            {"applications": [{"import_path": "deployments.app:build", "deployments": [{"name": "W", "config": {}}]}]},
            "no field config",
        ),
    ],
)
def test_a_planted_error_in_a_document_is_found(wrong: dict[str, Any], finding: str) -> None:
    assert any(finding in text for text in findings({**serve_document("base"), **wrong}))


def test_the_demo_model_is_where_the_images_script_puts_it() -> None:
    script = (K8S / "image" / "install.sh").read_text()
    assert "$target/models" in script
    assert 'joinpath("demo")' in script
    assert "k8s/image/install.sh /opt/stallfree " in (ROOT / "Dockerfile").read_text()
    assert serve_args("overlays/cpu-demo")["model"] == "/opt/stallfree/models/demo"


def test_the_base_has_the_environment_that_the_code_sets() -> None:
    """Also where nothing renders: whoever adds a variable hears of the manifests at once."""
    service = yaml.safe_load((K8S / "base" / "rayservice.yaml").read_text())
    cluster = service["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        variables = group["template"]["spec"]["containers"][0]["env"]
        flags = {each["name"]: each["value"] for each in variables if each["name"].startswith("RAY_")}
        assert flags == RAY_ENVIRONMENT


@pytest.mark.parametrize(
    "text", [None, "a: [", "- 1", "applications: 3", "applications: [{name: x}]", "applications: [{args: []}]"]
)
def test_what_is_no_document_is_refused_in_one_line(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "serve.yaml"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(sys, "argv", ["localize", str(path)])
    assert main() == 2
    error = capsys.readouterr().err
    assert error.startswith(f"python -m k8s.localize: error: document: {path}")
    assert error.count("\n") == 1

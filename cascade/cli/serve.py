"""`cascade check` and `cascade serve`, whose configuration is a YAML file, or models named on the command line."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cascade import errors
from cascade.cli import screen
from cascade.cli.options import DRAFT, adding
from cascade.cli.screen import console
from cascade.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from cascade.settings.config import CascadeConfig
    from deployments.ops.launch import Server

SERVING = "deployments"  # the package that runs on Ray
LEAST_SHARE = 0.1  # the least share of a GPU that a model gets
# the argument and the options that `configured` takes
model_options = adding(
    (
        click.argument("model", required=False),
        DRAFT,
        click.option("--tensor-parallel-size", type=click.IntRange(1), help="GPUs that share the full model, on vLLM."),
        click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), help="Dtype of all models."),
        click.option(
            "--max-model-len", type=click.IntRange(2), help="Tokens of prompt and output; by default the models' context."
        ),
        click.option("--served-model-name", multiple=True, help="Name of the full model for clients; may be repeated."),
    )
)


@click.command()
@model_options
def check(**models: Any) -> None:
    """Print what the tiers of MODEL need, and check that they fit together, without loading a weight.

    MODEL is as for `cascade serve`. If they do not fit, prints one sentence and exits with status 1.
    """
    parsed = configured(**models)  # before the imports that take seconds
    from cascade.settings.check import needs, remarks, unpinned, verify, weightless
    from deployments.app import build

    with console.status("Reading configurations"):
        requirements = needs(parsed)
    console.print(screen.needs(requirements))
    verify(parsed)
    build(parsed.model_copy(update={"verify": False}))  # checks that Ray Serve takes the options of deployments
    problem = next((need.problem for need in requirements if need.problem), weightless(parsed))
    if problem:
        raise ConfigError(problem)
    for remark in filter(None, [unpinned(parsed), *remarks(requirements)]):
        console.print(remark)
    console.print("The tiers fit together.")


def check_own_code() -> None:
    """Raise `ConfigError` if another module is imported as `deployments`, here or in Ray's processes.

    In all processes of Ray, the folder in which a command runs is on the path before installed packages.
    """
    own = Path(errors.__file__).parents[1] / SERVING
    spec = find_spec(SERVING)
    paths = [] if spec is None or spec.origin is None else [Path(spec.origin)]
    paths += [path for path in (Path.cwd() / SERVING / "__init__.py", Path.cwd() / f"{SERVING}.py") if path.is_file()]
    for path in paths:
        if path.resolve() != (own / "__init__.py").resolve():
            shown = path.parent if path.name == "__init__.py" else path
            raise ConfigError(f"{str(shown)!r} hides cascade's own package {SERVING!r}: rename it, or start in another folder")


def configured(
    model: str | None,
    drafts: Sequence[str] = (),
    tensor_parallel_size: int | None = None,
    dtype: str | None = None,
    max_model_len: int | None = None,
    served_model_name: Sequence[str] = (),
) -> "CascadeConfig":
    """The configuration of a YAML file, of ``model`` with ``drafts`` below it, or of the demonstration family.

    Options override the file. Raises `ConfigError`.
    """
    check_own_code()
    from cascade.settings.config import CascadeConfig
    from cascade.settings.llm_configs import load_config

    path = Path(model or "")
    if path.suffix in (".yaml", ".yml") or (path.is_file() and path.suffix != ".gguf"):
        if drafts:
            raise ConfigError(f"{path} is a configuration, which names its tiers: leave --draft out, or give a model")
        values = load_config(path).model_dump(mode="json", exclude_unset=True)
    elif model is not None:
        values = {"tiers": _tiers([*reversed(drafts), model], tensor_parallel_size or 1)}
    elif drafts:
        raise ConfigError("--draft is given without a model: name the model that it drafts for first")
    else:
        values = CascadeConfig.demo().model_dump(mode="json", exclude_unset=True)
    kwargs = [tier.setdefault("engine_kwargs", {}) for tier in values["tiers"]]
    if dtype is not None:
        for options in kwargs:
            options["dtype"] = dtype
    if tensor_parallel_size is not None:
        kwargs[-1]["tensor_parallel_size"] = tensor_parallel_size
    if max_model_len is not None:
        values["max_model_len"] = max_model_len
    if served_model_name:
        values.setdefault("router", {})["served_model_name"] = list(served_model_name)
    return CascadeConfig.parse(values)


def _tiers(models: Sequence[str], ranks: int) -> list[dict[str, Any]]:
    """Tiers of ``models``, bottom to top, on this machine's GPUs or cores; the last one takes ``ranks`` GPUs."""
    import torch

    from cascade.local import tier_names

    names = tier_names(models, None)
    needed: list[tuple[dict[str, float], dict[str, int]]]
    if num_gpus := torch.cuda.device_count():
        needed = [({"num_gpus": share}, {}) for share in _gpus(models, num_gpus, ranks)]
    else:
        threads = [*[1] * (len(models) - 1), os.cpu_count() or 1]
        needed = [({}, {"num_threads": count}) for count in threads]
    return [
        {
            "name": name,
            "model_loading_config": {"model_id": model},
            "engine_kwargs": engine,
            "deployment_config": {"ray_actor_options": {"num_cpus": 0.5, **actor}},
        }
        for name, model, (actor, engine) in zip(names, models, needed, strict=True)
    ]


def _gpus(models: Sequence[str], num_gpus: int, ranks: int) -> list[float]:
    """GPUs of each model, or its share of one; raises `ConfigError` if there are too few, or a model cannot be read."""
    num_drafts, free = len(models) - 1, num_gpus - ranks
    if not num_drafts:
        return [ranks]
    if free > 0:
        return [*[1 / -(-num_drafts // free)] * num_drafts, ranks]
    if num_gpus > 1:
        raise ConfigError(
            f"--tensor-parallel-size is {ranks} and this machine has {num_gpus} GPUs, which leaves none for {models[0]}: "
            "lower it, or leave --draft out"
        )
    from cascade.engine.checkpoint import anatomy

    try:
        sizes = [anatomy(model).weight_bytes for model in models]
    except ModelError as error:
        raise ConfigError(str(error)) from None
    weights = [max(size, LEAST_SHARE * sum(sizes)) for size in sizes]
    return [int(100 * weight / sum(weights)) / 100 for weight in weights]


@click.command()
@model_options
@click.option("--host", help="Address to listen on; 127.0.0.1 by default.")
@click.option("--port", type=click.IntRange(0, 65535), help="HTTP port; 8000 by default, 0 for any free one.")
@click.option("--grpc-port", type=click.IntRange(0, 65535), help="gRPC port; 9000 by default, 0 for any free one.")
@click.option("--api-key", metavar="KEY", help="Key that clients must send, 8 characters or more.")
@click.option("--name", default="cascade", show_default=True, help="Name of the application on a Ray cluster.")
def serve(host: str | None, port: int | None, grpc_port: int | None, api_key: str | None, name: str, **models: Any) -> None:
    """Serve MODEL, a path or hub id, until Ctrl-C; smaller models of its family draft for it.

    MODEL may also be a YAML file (docs/reference/configuration.md). By default the models that ship are served.

    \b
    cascade serve Qwen/Qwen3-32B --draft Qwen/Qwen3-4B --draft Qwen/Qwen3-0.6B
    """
    config = configured(**models)
    access = config.router.access
    if api_key is not None:
        if os.environ.get("RAY_ADDRESS", "local") not in ("", "local"):  # the cluster's routers would not require the key
            raise ConfigError(f"--api-key is for this machine: set {access.keys_env} where the routers of the cluster run")
        if os.environ.get(access.keys_env):
            raise ConfigError(f"--api-key is given, and {access.keys_env} has keys: give only one of them")
        os.environ[access.keys_env] = f"cli={api_key}"
    stopping = contextlib.suppress(KeyboardInterrupt)  # also during the start: the server may answer before that ends
    with stopping, started(config, host=host, port=port, grpc_port=grpc_port, name=name) as server:
        console.print(f"[bold green]Serving[/] {', '.join(server.tiers)} on [bold]{server.address}[/]. Ctrl-C stops.")
        console.print(f"HTTP, and a page to look at: [bold]{server.url}[/]. For Prometheus: {server.url}/metrics\n")
        keyed = bool(access.keys_file or os.environ.get(access.keys_env))
        message = usage(server.address, server.url, server.model, keyed=keyed)
        console.print(message, markup=False, soft_wrap=True)  # without line breaks, for copying
        server.wait()


@contextlib.contextmanager
def started(config: "CascadeConfig", **options: Any) -> Iterator["Server"]:
    """Start a server, and stop it at the end; a terminal shows the progress."""
    with console.status("Loading Ray") as status:
        from deployments.ops.launch import Server

        server = Server.start(config, tell=status.update, **options)
    try:
        yield server
    finally:
        with contextlib.ExitStack() as shown:
            with contextlib.suppress(OSError):  # the terminal may be closed
                shown.enter_context(console.status("Shutting down once answers have ended; Ctrl-C again does not wait"))
            server.stop()


def usage(address: str, url: str, model: str, *, keyed: bool = False) -> str:
    """Commands that call a server at ``address`` and ``url``, with the key in ``CASCADE_API_KEY`` if it is ``keyed``."""
    key = '-H "Authorization: Bearer $CASCADE_API_KEY" ' if keyed else ""
    first = "  export CASCADE_API_KEY=...\n" if keyed else ""
    return f"""{first}  cascade chat --address {address}
  cascade top --address {address} --url {url}
  curl {url}/v1/completions {key}-H 'Content-Type: application/json' \\
      -d '{{"model": "{model}", "prompt": "def fibonacci(n):", "max_tokens": 64, "temperature": 0}}'
"""

"""``splitup run``: a model over arrays in files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splitup.cli.command import JsonOutput, as_command
from splitup.cli.console import Output
from splitup.cli.cost import Cost, wait_for_cost
from splitup.cli.options import ConfigFlag, PaymentOptions

if TYPE_CHECKING:
    from splitup.client.outcome import Array, Result


@as_command(hint="loading")
async def command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Name or id of a registered model.")
    ],
    inputs: Annotated[
        list[str],
        typer.Option(
            "--input", metavar="NAME=FILE", help="NAME=FILE.npy; once per input of the model."
        ),
    ],
    directory: Annotated[
        Path, typer.Option("--output", metavar="DIR", help="Directory for the outputs.")
    ],
    payment: PaymentOptions,
    config: ConfigFlag = None,
    *,
    output: JsonOutput,
) -> None:
    """Run a model over arrays; write every output as NAME.npy."""
    import numpy as np

    from splitup.client.connection import SplitUp

    arrays = dict(_read_input(text) for text in inputs)
    async with SplitUp.connect(config) as net:
        output.hint(f"running {model}")
        result = await net.execute(
            model,
            arrays,
            max_price_usdc=payment.max_price,
            deadline_s=payment.deadline,
            verify=payment.verify,
        )
        locked = result.plan.request.max_price_micro_usdc
        cost = await wait_for_cost(output, net, result.execution_id, locked)
    directory.mkdir(parents=True, exist_ok=True)
    files = {name: name_file(directory, name) for name in result.outputs}
    for name, path in files.items():
        path.unlink(missing_ok=True)  # which may be a link
        np.save(path, result.outputs[name], allow_pickle=False)
    found = {**_describe_result(result, files), **cost.to_dict()}
    output.give(found, lambda: _show(output, result, files, cost))


def name_file(directory: Path, name: str) -> Path:
    """Return an output's file: in ``directory``, also if its developer calls it "../x"."""
    return directory / f"{name.replace('%', '%25').replace('/', '%2F')}.npy"


def _show(output: Output, result: Result, files: dict[str, Path], cost: Cost) -> None:
    for name, path in files.items():
        array = result.outputs[name]
        output.out.print(f"{name}: {array.dtype}{list(array.shape)} in {path}")
    nodes = len(set(result.nodes))
    tasks = len(result.manifest.tasks)
    output.say(
        f"{tasks} task{'s' * (tasks != 1)} on {nodes} node{'s' * (nodes != 1)} "
        f"in {result.elapsed_s:.2f} s"
    )
    output.say(cost.text)


def _read_input(text: str) -> tuple[str, Array]:
    import numpy as np

    from splitup.core.errors import InvalidInput

    name, separator, file = text.partition("=")
    if not separator or not name:
        raise InvalidInput(f"--input {text} is not of the form NAME=FILE.npy")
    try:
        return name, np.load(Path(file), allow_pickle=False)
    except OSError as error:
        raise InvalidInput(
            f"input file {file} cannot be read ({error.strerror}); write it with numpy.save"
        ) from None
    except ValueError as error:
        raise InvalidInput(
            f"input file {file} is no array of numbers ({error}); write it with numpy.save"
        ) from None


def _describe_result(result: Result, files: dict[str, Path]) -> dict[str, Any]:
    return {
        "execution_id": result.execution_id,
        "elapsed_s": round(result.elapsed_s, 3),
        "nodes": list(result.nodes),
        "outputs": {
            name: {
                "file": str(path),
                "dtype": str(result.outputs[name].dtype),
                "shape": list(result.outputs[name].shape),
            }
            for name, path in files.items()
        },
    }

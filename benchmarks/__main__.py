"""Command line: `python -m pressroom.benchmarks COMMAND`. Each command imports its implementation when it runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Demo and benchmarks of KV-cache presses.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[str | None, typer.Option(help="Hub id or local folder. Default: the packaged SmolLM2-135M.")]
Methods = Annotated[str | None, typer.Option(help="Method names, separated by commas.")]
Budget = Annotated[int | None, typer.Option(min=1, help="Entries kept per layer and KV head.")]
Interval = Annotated[int | None, typer.Option(min=1, help="Generated tokens between two compressions.")]
Tokens = Annotated[int | None, typer.Option(min=1, help="Tokens to generate or to score.")]
Output = Annotated[Path | None, typer.Option(help="Folder for the results.")]


@app.command()
def demo(
    model: Model = None,
    methods: Methods = None,
    prompt: Annotated[str | None, typer.Option(help="What to ask the model.")] = None,
    budget: Budget = None,
    interval: Interval = None,
    tokens: Tokens = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the run.")] = None,
    output: Output = None,
) -> None:
    """Generate with a full and with compressed caches, and compare speed, memory and text."""
    from .demo import main

    _run(
        main,
        **_given(
            model=model,
            methods=_split(methods),
            prompt=prompt,
            budget=budget,
            interval=interval,
            tokens=tokens,
            seed=seed,
            output=output,
        ),
    )


@app.command()
def fidelity(
    model: Model = None,
    texts: Annotated[Path | None, typer.Option(help="File or folder of texts to score.")] = None,
    methods: Methods = None,
    budget: Budget = None,
    interval: Interval = None,
    tokens: Tokens = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of each text that are the prompt.")] = None,
    output: Output = None,
) -> None:
    """Compare next-token distributions with those of the full cache, teacher-forced on given texts."""
    from .fidelity import main

    _run(
        main,
        **_given(
            model=model,
            texts=texts,
            methods=_split(methods),
            budget=budget,
            interval=interval,
            tokens=tokens,
            prompt_tokens=prompt_tokens,
            output=output,
        ),
    )


@app.command()
def memory(
    model: Model = None,
    methods: Methods = None,
    budget: Budget = None,
    interval: Interval = None,
    tokens: Tokens = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of the random prompt.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Rows.")] = None,
) -> None:
    """Measure peaks of prefill and decoding, first-token time and bytes of the cache, method by method."""
    from .memory import main

    _run(
        main,
        **_given(
            model=model,
            methods=_split(methods),
            budget=budget,
            interval=interval,
            tokens=tokens,
            prompt_tokens=prompt_tokens,
            batch=batch,
        ),
    )


@app.command()
def speed(
    suite: Annotated[str, typer.Argument(help="Name of the suite.")],
    smoke: Annotated[bool, typer.Option("--smoke", help="Smallest shapes, one repeat: does it run?")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads for torch.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the result to this file.")] = None,
) -> None:
    """Time one suite; the last line of the output is the result as JSON."""
    from .speed import SUITES, print_table

    if suite not in SUITES:
        raise typer.BadParameter(f"{suite!r} is none of {', '.join(sorted(SUITES))}", param_hint="SUITE")
    result = SUITES[suite](smoke=smoke, threads=threads)
    print_table(result)
    line = json.dumps(result)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(line + "\n")
    print(line)


def _run(main: Callable[..., None], **options: Any) -> None:
    """Bad arguments are told in one line; they have been checked before anything is computed."""
    try:
        main(**options)
    except (ValueError, FileNotFoundError, ModuleNotFoundError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


def _given(**options: Any) -> dict[str, Any]:
    # What is not given is not passed on: defaults live in one place, the implementation.
    return {name: value for name, value in options.items() if value is not None}


def _split(names: str | None) -> list[str] | None:
    return None if names is None else [name.strip() for name in names.split(",") if name.strip()]


if __name__ == "__main__":
    app(prog_name="python -m pressroom.benchmarks")

"""The command line: ``accelopt-ray``.

Each command lives in a module of its own and imports what it needs when it runs, so that ``--help`` and mistakes are
answered at once.
"""

from __future__ import annotations

import sys

import typer

from accelopt_ray.cli import cluster, pool, prompts, sweep
from accelopt_ray.cli.bench import bench
from accelopt_ray.cli.compact import compact
from accelopt_ray.cli.compare import compare
from accelopt_ray.cli.cost import cost
from accelopt_ray.cli.doctor import doctor
from accelopt_ray.cli.export import export
from accelopt_ray.cli.fidelity import calibrate, fidelity
from accelopt_ray.cli.new_task import new_task
from accelopt_ray.cli.optimize import optimize
from accelopt_ray.cli.profile import profile
from accelopt_ray.cli.report import report
from accelopt_ray.cli.resume import resume
from accelopt_ray.cli.serve import serve_rewriter
from accelopt_ray.cli.watch import watch
from accelopt_ray.devices.faults import DeviceFault
from accelopt_ray.outcome import UserError

FAILURE_EXIT_CODE = 1
USER_ERROR_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130

# Typer carries a copy of click in newer versions; the common base of its usage errors is reached through a public name.
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="accelopt-ray",
    help="Makes accelerator kernels faster by searching with language models, in parallel on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(optimize)
app.command()(resume)
app.command()(profile)
app.command()(bench)
app.command()(fidelity)
app.command()(calibrate)
app.command()(report)
app.command()(watch)
app.command()(compare)
app.command()(cost)
app.command()(export)
app.command()(compact)
app.command()(doctor)
app.command("serve-rewriter")(serve_rewriter)
app.command("new-task")(new_task)
app.add_typer(cluster.app, name="cluster")
app.add_typer(pool.app, name="pool")
app.add_typer(prompts.app, name="prompts")
app.add_typer(sweep.app, name="sweep")


@app.callback()
def _top(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from accelopt_ray.version import code_version

        print(f"accelopt-ray {code_version()}")
        raise typer.Exit


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits: 0 done, 1 the work failed, 2 the user's mistake, 130 interrupted."""
    try:
        code = typer.main.get_command(app).main(args=arguments, prog_name="accelopt-ray", standalone_mode=False)
    except UserError as error:
        sys.exit(_complain(str(error)))
    except DeviceFault as fault:
        print("accelopt-ray: the device failed: " + " ".join(str(fault).split()), file=sys.stderr)
        sys.exit(FAILURE_EXIT_CODE)
    except _USAGE_ERROR as error:
        text = error.format_message() if hasattr(error, "format_message") else str(error)
        # Called without arguments, the "error" is the help text.
        if type(error).__name__ == "NoArgsIsHelpError":
            print(text)
            sys.exit(USER_ERROR_EXIT_CODE)
        context = getattr(error, "ctx", None)
        sys.exit(_complain(f"{text} (see {context.command_path if context else 'accelopt-ray'} --help)"))
    except (typer.Abort, KeyboardInterrupt):
        print("accelopt-ray: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED_EXIT_CODE)
    sys.exit(code if isinstance(code, int) else 0)


def _complain(message: str) -> int:
    print("accelopt-ray: " + " ".join(message.split()), file=sys.stderr)
    return USER_ERROR_EXIT_CODE

"""The command line: the name of each command and its module."""

from __future__ import annotations

from importlib import import_module

import click

from requant.quantize.commands.app import Commands

MODULES = {
    "app": ("completion", "help"),
    "calibrate": ("calibrate",),
    "check": ("check", "init"),
    "costs": ("costs",),
    "demo": ("demo",),
    "look_at_models": ("diff", "inspect", "ops", "report", "view"),
    "measure": ("bench", "compare", "compile", "explain", "kernels"),
    "quantize": ("quantize",),
    "reproduce": ("reproduce",),
    "sensitivity": ("sensitivity",),
    "transform": ("transform", "transforms"),
}
"""The commands of each module of `requant.quantize.commands`."""


class LazyCommands(Commands):
    """The group of all commands. It imports a command's module when the command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, sorted."""
        return sorted(name for names in MODULES.values() for name in names)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by name; None if it does not exist."""
        module = next((module for module, names in MODULES.items() if cmd_name in names), None)
        if module is None:
            return None
        commands = import_module(f"requant.quantize.commands.{module}")
        command = getattr(commands, cmd_name, None) or getattr(commands, f"{cmd_name}_")
        assert isinstance(command, click.Command)
        return command


@click.group(cls=LazyCommands)
@click.version_option(package_name="requant", message="%(prog)s %(version)s")
def main() -> None:
    """Turn a float ONNX model and a sample of its data into a measured INT8 model.

    \b
    requant quantize model.onnx --data calib.npz -o model_int8.onnx
    requant compare model.onnx model_int8.onnx --data test.npz
    """


if __name__ == "__main__":
    from requant.__main__ import run

    run()

"""The command line. Only its modules print, and none imports PyTorch or Ray before its command runs."""

from typing import Any

import click

from cascade.cli.chat import chat, generate
from cascade.cli.demo import demo
from cascade.cli.plan import agreement, layers, plan
from cascade.cli.serve import check, serve
from cascade.cli.top import top
from cascade.cli.training import align, distill, forget, rollback
from cascade.errors import CascadeError


class Cli(click.Group):
    """Prints errors of this package, and of files, as one sentence, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CascadeError as error:
            raise click.ClickException(str(error)) from error
        except BrokenPipeError:  # click ends at once: whoever read the output has gone
            raise
        except (OSError, UnicodeError) as error:
            name, why = getattr(error, "filename", None), getattr(error, "strerror", None)
            raise click.ClickException(f"{name or 'A file'} cannot be read or written: {why or error}") from error


@click.group(cls=Cli, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="cascade-serve", prog_name="cascade")
def main() -> None:
    """Serve a large language model faster, without changing a token of what it says.

    \b
    cascade demo                        five questions, and a comparison of speeds
    cascade serve                       the same models as a server: HTTP, gRPC and a chat page
    cascade serve my.yaml               your own models
    cascade check my.yaml               what they need, and whether they fit together
    cascade plan --help                 predict speeds on devices that are not at hand
    cascade chat --address HOST:PORT    chat with the server
    cascade generate "def main():"      continue a text
    cascade top                         watch a server
    """


for command in (demo, serve, check, plan, agreement, layers, chat, generate, top, distill, align, rollback, forget):
    main.add_command(command)

if __name__ == "__main__":
    main()

"""Fills in what reference pages say of the code: `make docs`, or ``python -m docs.generate``.

A page has blocks, each between a line ``<!-- generated: NAME ARGUMENT -->`` and ``<!-- end -->``; the function NAME of `BLOCKS`
writes what stands there. What a field means is the comment beside it, or above it, in the code.
"""

import ast
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from pydoc import locate
from types import MappingProxyType
from typing import Any, Unpack, cast, get_args, get_origin

import click
import yaml
from pydantic import BaseModel

ROOT = Path(__file__).parents[1]
PAGES = Path(__file__).parent
BLOCK = re.compile(r"(<!-- generated: (\w+) ?(\S*) -->\n).*?(<!-- end -->)", re.DOTALL)
WORDS = {"string": "text", "object": "mapping"}  # kinds of values that have other names here
LIMITS = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}
LIMITS |= {"minItems": "at least", "maxItems": "at most"}
WIDTH = 100


def main() -> None:
    """Write all pages anew."""
    for page in sorted(PAGES.rglob("*.md")):
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


def filled(page: str) -> str:
    """``page`` with every block as the code has it now."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{BLOCKS[found[2]](found[3]).strip()}\n\n{found[4]}", page)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown, without columns of which all cells are empty."""
    rows = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    kept = [index for index in range(len(head)) if any(row[index] for row in rows)]
    lines = ([head[index] for index in kept], ["---"] * len(kept), *([row[index] for index in kept] for row in rows))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def comments(kind: type) -> dict[str, str]:
    """What each field of ``kind`` means: the comment above it and the one beside it."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__[:-1]):
        if one.__module__.split(".")[0] not in ("cascade", "deployments"):
            continue
        source = textwrap.dedent(inspect.getsource(one))
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        said = {token.start[0]: token.string[1:].strip() for token in tokens if token.type == tokenize.COMMENT}
        [definition] = ast.parse(source).body
        for node in cast(ast.ClassDef, definition).body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                first = node.lineno
                while source.splitlines()[first - 2].strip().startswith("#"):
                    first -= 1
                words = " ".join(said[line] for line in range(first, (node.end_lineno or first) + 1) if line in said)
                found[node.target.id] = words or found.get(node.target.id, "")
    return found


# configuration


def settings(_: str) -> str:
    """Each section as YAML with comments; one that stands at two places is shown once."""
    from cascade.settings.config import CascadeConfig

    places: dict[type[BaseModel], str] = {}
    return "\n\n".join(_section("", CascadeConfig, places))


def _section(place: str, section: type[BaseModel], places: dict[type[BaseModel], str]) -> Iterator[str]:
    meanings, schema = comments(section), section.model_json_schema()
    base = section.__mro__[1] if section.__mro__[1] in places else None
    lines, below = [], []
    for name, field in section.model_fields.items():
        if base is not None and name not in section.__annotations__:
            continue
        shape = schema["properties"][name]
        kind, default = _shape(shape, schema.get("$defs", {})), _value(shape.get("default"))
        for inner in _models(field.annotation):
            several = "[]" if "tuple" in str(field.annotation) else ".NAME" if "dict" in str(field.annotation) else ""
            if inner not in places:
                places[inner] = f"{place}{name}{several}"
                below.append(inner)
            kind, default = "" if places[inner] == f"{place}{name}{several}" else f"see {places[inner]}", ""
        if kind in ("boolean", "text"):
            kind = ""
        elif default and kind.startswith(("integer", "number")):
            kind = kind.partition(" ")[2]
        needed = "required" if field.is_required() else ""
        marks = filter(None, (meanings[name], kind, needed))
        lines.append(_line(f"{name}: {'...' if needed else default}".rstrip(), _sentence("; ".join(marks))))
    if place:
        yield f"### {place.strip('.')}"
        if base is None:
            yield _prose(section).split("\n\n")[0]
    if base is not None:
        yield f"Fields are those of [`{places[base]}`](#{_anchor(places[base])}); these have other defaults:"
    yield "```yaml\n" + "\n".join(lines) + "\n```"
    for inner in below:
        yield from _section(f"{places[inner]}.", inner, places)


def sections(section: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """``section`` and all that are in it."""
    yield section
    for field in section.model_fields.values():
        for inner in _models(field.annotation):
            yield from sections(inner)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Sections that an annotation names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _models(argument)


def _shape(shape: dict[str, Any], known: dict[str, Any]) -> str:
    """A JSON schema in words."""
    if "$ref" in shape:
        return _shape(known[shape["$ref"].rpartition("/")[2]], known)
    if "anyOf" in shape:
        return " or ".join(_shape(one, known) for one in shape["anyOf"] if one.get("type") != "null")
    if "enum" in shape or "const" in shape:
        return ", ".join(f"`{value}`" for value in shape.get("enum", [shape.get("const")]))
    limits = " ".join(f"{word} {shape[key]:g}" for key, word in LIMITS.items() if key in shape)
    if "minimum" in shape and "maximum" in shape:
        limits = limits.removeprefix("from ")
    if shape.get("type") == "array":
        if "minItems" in shape and shape["minItems"] == shape.get("maxItems"):
            limits = f"{shape['minItems']} of them"
        return f"list of {_shape(shape.get('items', {}), known)}" + (f", {limits}" if limits else "")
    words = WORDS.get(shape.get("type", ""), shape.get("type", "anything"))
    return f"{words} {limits}" if limits else words


def _value(value: Any) -> str:
    return (
        ""
        if value in (None, [], {}, ())
        else str(value).lower()
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def _anchor(path: str) -> str:
    """Of a heading, as GitHub and MkDocs make it."""
    return re.sub(r"[^\w-]", "", path.lower())


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] if text.split(" ")[0].islower() else text


# commands


def cli(_: str) -> str:
    """A section for each command."""
    from cascade.cli.main import main as program
    from cascade.cli.options import OPTIONS

    @click.command()
    def asked() -> None: ...

    for option in OPTIONS:
        asked = option(asked)
    common = {option.name or "" for option in asked.params}
    context = click.Context(program, info_name="cascade", max_content_width=100)
    names = ", ".join(f"`{option.opts[0]}`" for option in asked.params)
    shown: dict[tuple[str, str], str] = {}
    parts = [part for name in program.list_commands(context) for part in _command(program, name, context, common, shown)]
    return "\n\n".join((*filter(None, parts), "## Options of a request", f"{names}. [Meanings and ranges](parameters.md)."))


def _command(
    group: click.Group, name: str, above: click.Context, common: set[str], shown: dict[tuple[str, str], str]
) -> Iterator[str]:
    """A command's section; ``shown`` has the options of those before it, which it does not repeat."""
    command = group.get_command(above, name)
    assert command is not None
    context = click.Context(command, info_name=name, parent=above)
    yield f"## {context.command_path}"
    text = re.sub(r"\x08\n((?:.+\n?)+)", lambda found: f"```\n{found[1].strip()}\n```", inspect.cleandoc(command.help or ""))
    if not isinstance(command, click.Group) and "```" not in text:
        yield f"```\n{context.command_path} {' '.join(command.collect_usage_pieces(context))}\n```"
    yield text
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            yield from _command(command, inner, context, common, shown)
        return
    own = command.params
    if common <= {option.name for option in own}:
        own = [option for option in own if option.name not in common]
        yield "It also takes the [options of a request](#options-of-a-request)."
    records = _records(own, context)
    again: dict[str, list[str]] = {}
    for record in records:
        if record in shown:
            again.setdefault(shown[record], []).append(re.findall(r"--[\w-]+", record[0])[0])
    for path, names in again.items():
        yield f"As for [{path}](#{path.replace(' ', '-')}): {', '.join(f'`{name}`' for name in names)}."
    yield _options(record for record in records if record not in shown)
    shown.update({record: context.command_path for record in records if record not in shown})


def _records(options: Sequence[click.Parameter], context: click.Context) -> list[tuple[str, str]]:
    """Name and meaning of each option."""
    found = (option.get_help_record(context) for option in options if isinstance(option, click.Option))
    return [(name.replace(" RANGE", ""), text.replace("  [", " [")) for name, text in filter(None, found)]


def _options(records: Iterable[tuple[str, str]]) -> str:
    """As `--help` prints them."""
    formatter = click.HelpFormatter(width=WIDTH)
    if rows := list(records):
        formatter.write_dl(rows)
    return f"```\n{formatter.getvalue()}```" if rows else ""


# metrics, errors, models, calls


def series(place: str) -> str:
    """What is counted at ``place`` alone, or at both."""
    from deployments.ops.metrics import PREFIX, SERIES, VLLM

    rows = []
    for one in SERIES.values():
        if place == ("both" if len(one.places) > 1 else one.places[0]):
            name = one.shown.removeprefix(PREFIX) + (f"{{{','.join(one.labels)}}}" if one.labels else "")
            kind = " (histogram)" if one.kind == "histogram" else ""
            same = f" = `vllm:{VLLM[one.name]}`" if one.name in VLLM else ""
            rows.append((f"`{name}`", one.help.rstrip(".") + kind + same))
    return table(["series", "meaning"], rows)


def alerts(_: str) -> str:
    rules = yaml.safe_load((ROOT / "cluster" / "prometheus" / "rules.yaml").read_text())["groups"][0]["rules"]
    plain = re.compile(r"\{\{ \$(?:labels\.)?(\w+)[^}]*\}\}")
    rows = [(f"`{rule['alert']}`", plain.sub(r"*\1*", rule["annotations"]["summary"])) for rule in rules]
    return table(["alert", "what is wrong"], rows)


def errors(_: str) -> str:
    from cascade.errors import KINDS, CascadeError

    told = [(kind.__name__, _prose(kind), kind) for kind in KINDS if kind is not CascadeError]
    told += [("CascadeError", "Anything else of this package.", CascadeError)]
    told += [("Exception", "A bug: the log has its traceback.", CascadeError)]
    rows = [(f"`{name}`", said, f"`{of.grpc}`, {of.http}", f"`{of.type}`, `{of.code}`") for name, said, of in told]
    return table(["error", "meaning", "gRPC, HTTP", "`error.type`, `error.code`"], rows)


def models(which: str) -> str:
    """Architectures that tests serve, or see refused, by their ``model_type``."""
    from tests import architectures

    return ", ".join(f"`{name}`" for name in sorted({name.split("-")[0] for name in getattr(architectures, which.upper())}))


def calls(_: str) -> str:
    """Of the service in the protocol."""
    proto = (ROOT / "protos" / "cascade" / "v1" / "serving.proto").read_text(encoding="utf-8")
    found = re.findall(r"  // (.+)\n  rpc (\w+)\((\w+)\) returns \((stream )?(\w+)\);", proto)
    rows = [(f"`{name}`", f"`{asked}`", f"{stream}`{answer}`", meaning) for meaning, name, asked, stream, answer in found]
    return table(["call", "request", "response", "what it does"], rows)


# Python


def api(path: str) -> str:
    """A class: what it is for, its constructor, its methods; of a result its fields, without defaults."""
    kind = locate(path)
    assert isinstance(kind, type), path
    name = kind.__name__
    parts = [f"## {name}", _prose(kind)]
    if is_dataclass(kind):
        parts[1] = parts[1].split("\n\n")[0]
        meanings = comments(kind)
        shown = [field for field in fields(kind) if not field.name.startswith("_")]
        lines = (_line(f"{field.name}: {_plain(field.type)}".replace("'", '"'), meanings[field.name]) for field in shown)
        parts.append("```python\n" + "\n".join(lines) + "\n```")
    elif (made := inspect.getattr_static(kind, "__init__")) is not object.__init__ and not hasattr(kind, "from_pretrained"):
        parts += [_signature("__init__", made), _prose(made)]
    bases = [base for base in reversed(kind.__mro__) if base.__module__.split(".")[0] == "cascade"]
    types = {variable: type for base in getattr(kind, "__orig_bases__", ()) for variable, type in _arguments(base)}
    signatures: dict[str, str] = {}
    for name, member in {name: member for base in bases for name, member in vars(base).items()}.items():
        if not name.startswith("_") and isinstance(member, property) and member.__doc__:
            parts.append(f"**`{name}`**: {_prose(member)}")
        function = member.__func__ if isinstance(member, classmethod) else member
        if not name.startswith("_") and inspect.isfunction(function) and function.__doc__:
            signature = _signature(name, function, types)
            arguments = signature.partition("(")[2].rpartition(")")[0]
            answer = signature.rpartition(" -> ")[2].partition(":")[0]
            if not arguments:
                signature = "" if answer == "None" else f"Gives `{answer}`."
            elif (same := signatures.setdefault(arguments, name)) != name:
                signature = f"Takes what `{same}` takes, gives `{answer}`."
            parts += [f"### {kind.__name__}.{name}", signature, _prose(function)]
    return "\n\n".join(part for part in parts if part)


def _prose(thing: Any) -> str:
    """A docstring in Markdown: its examples as code."""
    text = inspect.cleandoc(thing.__doc__ or "").replace("``", "`")
    return re.sub(
        r"(?:^(?:>>>|\.\.\.).*\n?)+",
        lambda found: "```python\n" + re.sub(r"^(?:>>>|\.\.\.) ?", "", found[0], flags=re.MULTILINE).rstrip() + "\n```\n",
        text,
        flags=re.MULTILINE,
    )


def _arguments(base: Any) -> Iterator[tuple[Any, Any]]:
    """Type variables of a generic base, and the types that stand for them."""
    return zip(getattr(get_origin(base), "__parameters__", ()), get_args(base), strict=False)


def _signature(name: str, function: Callable[..., Any], types: Mapping[Any, Any] = MappingProxyType({})) -> str:
    found = inspect.signature(function)
    kept = [
        one.replace(annotation=_Plain(one.annotation)) for key, one in found.parameters.items() if key not in ("self", "cls")
    ]
    given = [str(one) for one in kept]
    first_named = next((index for index, one in enumerate(kept) if one.kind is one.KEYWORD_ONLY), None)
    if first_named is not None:
        given.insert(first_named, "*")
    answer = "" if name == "__init__" else f" -> {_plain(types.get(found.return_annotation, found.return_annotation))}"
    text = f"def {name}({', '.join(given)}){answer}: ..."
    if len(text) > WIDTH:
        text = f"def {name}(\n    {''.join(f'{one},{chr(10)}    ' for one in given).rstrip()}\n){answer}: ..."
    return "```python\n" + text.replace("'", '"') + "\n```"


class _Plain:
    """An annotation that is shown as `_plain` has it."""

    def __init__(self, annotation: Any) -> None:
        self.text = _plain(annotation)

    def __repr__(self) -> str:
        return self.text


def _plain(annotation: Any) -> str:
    if get_origin(annotation) is Unpack:
        return str(get_args(annotation)[0].__name__)
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", text)


def _line(field: str, meaning: str) -> str:
    """A field that is shown as code, with its meaning beside it or above it."""
    if len(field) + len(meaning) < WIDTH - 4:
        return f"{field}  # {meaning}" if meaning else field
    return textwrap.fill(meaning, WIDTH, initial_indent="# ", subsequent_indent="#   ") + f"\n{field}"


BLOCKS: dict[str, Callable[[str], str]] = {
    one.__name__: one for one in (settings, cli, series, alerts, errors, models, calls, api)
}

if __name__ == "__main__":
    main()

"""The generated pages of docs/. Each is made from the code; `tests/docs/test_reference_pages.py` compares."""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Final

import click
from msgspec import NODEFAULT, Struct, structs
from rest_node import node_view

from rt.cli.main import cli
from rt.exposition import Metric
from rt.query.monitoring.checkpoint_stats import CheckpointStats
from rt.query.monitoring.metrics import metrics_of as metrics_of_queries
from rt.query.monitoring.status import EngineStatus
from rt.streams.core.metrics import metrics_of as stream_metrics_of
from sequencer.config.config import NodeConfig
from sequencer.config.config_loader import KEYS
from sequencer.node.cli import node
from sequencer.rest.page import PAGE_FILES
from sequencer.rest.views.endpoints import ACTIONS, ENDPOINTS
from sequencer.rest.views.node_metrics import metrics_of
from sequencer.rest.views.openapi import document
from sequencer.state.configuration import Configuration

NOTE: Final = "<!-- Generated from the code by `pytest tests/docs/test_reference_pages.py --rewrite`. -->"
Lines = Iterator[str]

NO_QUERIES = EngineStatus("running", None, (), (), (), (), CheckpointStats(), 0, 0, 0.0)


def _page(title: str, lines: Iterable[str]) -> str:
    text = "\n".join([f"# {title}", "", NOTE, "", *lines])
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Lines:
    found = [[_cell(cell) for cell in row] for row in rows]
    if found:
        yield from (_row(header), _row(["---"] * len(header)), *map(_row, found), "")


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


# docs/cli.md


def cli_page() -> str:
    """Every command, with its options."""
    intro = """
        Data goes to stdout. Messages, logs and progress bars go to stderr.

        Every option can also be set by the environment variable in its row. An option on the command line
        takes precedence over the variable. The options of `rt node` can also be set in a file: see
        [configuration](configuration.md).

        | exit status | meaning |
        | --- | --- |
        | 0 | success |
        | 1 | failure, or a check found a problem |
        | 2 | wrong options or arguments |
        | 71 | `rt node`: the data of this node differs from that of the other nodes |
        | 130, 143 | stopped by SIGINT, SIGTERM |
    """
    return _page("Command line", [*_dedented(intro), "", *_commands(commands())])


def commands(
    command: click.Command = cli, parent: click.Context | None = None, name: str = "rt"
) -> Iterator[tuple[click.Context, click.Command]]:
    """Yield the command and all its subcommands, each with a context."""
    settings: dict[str, Any] = {**cli.context_settings, **command.context_settings}
    if parent is not None:
        settings = {key: value for key, value in settings.items() if key != "auto_envvar_prefix"}
    context = click.Context(command, parent=parent, info_name=name, resilient_parsing=True, **settings)
    yield context, command
    if isinstance(command, click.Group):
        for one in command.list_commands(context):
            below = command.get_command(context, one)
            assert below is not None
            if not below.hidden:
                yield from commands(below, context, one)


def _commands(found: Iterable[tuple[click.Context, click.Command]]) -> Lines:
    for context, command in found:
        path = context.command_path
        level = "##" if path.count(" ") < 2 else "###"
        usage = " ".join(command.collect_usage_pieces(context))
        yield from (f"{level} {path}", "", "```text", f"{path} {usage}", "```", "")
        yield from _help_text(command.help or "")
        rows = [
            _option_row(context, parameter)
            for parameter in command.params
            if isinstance(parameter, click.Option) and not parameter.hidden
        ]
        yield from _table(("option", "default", "variable", "description"), rows)


def _help_text(text: str) -> Lines:
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("\b"):
            yield from ("```text", *paragraph.splitlines()[1:], "```", "")
        else:
            yield from (*textwrap.wrap(" ".join(paragraph.split()), 110), "")


def _option_row(context: click.Context, option: click.Option) -> tuple[str, str, str, str]:
    names = ", ".join(map(_code, (*option.opts, *option.secondary_opts)))
    if not option.is_flag:
        names += " " + _code(_metavar(option, context))
    return names, _default(option, context), _variable(option, context), (option.help or "") + _range(option)


def _metavar(option: click.Option, context: click.Context) -> str:
    if isinstance(option.type, click.Choice) and option.metavar is None:
        return ", ".join(map(str, option.type.choices))
    metavar = option.metavar or option.type.get_metavar(option, context)
    if metavar is not None:
        return metavar
    names = {
        "integer range": "N",
        "integer": "N",
        "float range": "NUMBER",
        "float": "NUMBER",
        "directory": "DIR",
    }
    return names.get(option.type.name, option.type.name.upper())


def _range(option: click.Option) -> str:
    kind = option.type
    if not isinstance(kind, click.IntRange | click.FloatRange):
        return ""
    return (
        f" Range: {kind.min if kind.min is not None else ''} to {kind.max}."
        if kind.max is not None
        else (f" At least {kind.min}.")
    )


def _default(option: click.Option, context: click.Context) -> str:
    if option.required:
        return "required"
    if option.is_flag and not option.secondary_opts:
        return ""
    value = option.get_default(context, call=False)
    if value is None or value == () or not isinstance(value, str | int | float | tuple | bool):
        return ""
    if isinstance(value, bool):
        return _code((option.opts if value else option.secondary_opts)[0])
    return _code(", ".join(map(str, value)) if isinstance(value, tuple) else str(value))


def _variable(option: click.Option, context: click.Context) -> str:
    if option.name == "version":
        return ""
    if not option.allow_from_autoenv:
        return _code(f"RT_{(option.name or '').upper()}")
    prefix = context.auto_envvar_prefix
    if type(option) is click.Option:
        return _code(f"{prefix}_{(option.name or '').upper()}")
    long = next((name for name in option.opts if name.startswith("--")), None)
    return _code(f"{prefix}_{long[2:].replace('-', '_').upper()}") if prefix and long else ""


# docs/configuration.md

_UNITS: Final = (
    ("_bytes_max", "bytes"),
    ("_bytes", "bytes"),
    ("_minutes", "minutes"),
    ("_percent", "percent"),
    ("_port", "TCP port"),
)


def configuration_page() -> str:
    """Each setting of a node."""
    intro = """
        A setting comes from the first of these that gives it: a flag of `rt node`, the variable
        `RT_NODE_<KEY>`, the variable `RT_<KEY>`, the TOML file of `--config`, the default. A source replaces
        the whole value of a weaker source, also for `members`.

        An unknown key in the file is an error. A relative path in the file starts at the directory of the
        file; any other relative path starts at the working directory. A size is a number of bytes or a number
        with a unit, such as `512Mi` or `10Gi`.

        ```toml
        stream = "trades"
        name = "n1"
        directory = "/var/lib/rt"
        ca = "ca.crt"
        cert = "n1.crt"
        key = "n1.key"
        retention_minutes = 10080

        [members.n1]
        raft = "n1.example:7000"
        data = "n1.example:5002"

        [members.n2]
        raft = "n2.example:7000"
        data = "n2.example:5002"

        [members.n3]
        raft = "n3.example:7000"
        data = "n3.example:5002"
        ```

        ## This node
    """
    replicated = """
        ## The cluster

        These settings belong to the whole cluster. A node that sets one applies it when it becomes the
        leader. An operator can change those that no node sets with `POST /configuration`.
    """
    fields = {field.name: field for field in structs.fields(NodeConfig)}
    assert set(fields) == set(KEYS)
    options = {option.name: option for option in node.params if isinstance(option, click.Option)}
    shared = {field.name: field.default for field in structs.fields(Configuration)}
    header = ("key", "flag and variable", "unit", "default", "description")
    rows = {
        name: (
            _code(name),
            f"{_code(options[name].opts[0])} {_code('RT_' + name.upper())}",
            next((unit for end, unit in _UNITS if name.endswith(end)), ""),
            _setting_default(field, shared.get(name)),
            options[name].help or "",
        )
        for name, field in fields.items()
    }
    lines = [*_dedented(intro), ""]
    lines += _table(header, [row for name, row in rows.items() if name not in shared])
    lines += [*_dedented(replicated), ""]
    lines += _table(header, [row for name, row in rows.items() if name in shared])
    return _page("Configuration of a node", lines)


def _setting_default(field: structs.FieldInfo, shared: object) -> str:
    value = shared if field.default is None else field.default
    if value is NODEFAULT:
        return "required"
    if isinstance(value, bool):
        return _code(str(value).lower())
    return _code(str(value))


# docs/rest-api.md


def rest_page() -> str:
    """Each path of the REST API, from the OpenAPI document."""
    intro = """
        Every node answers over HTTPS on its REST port (default 6000), with mutual TLS. The role in the client
        certificate decides which paths may be called. `rt rest PATH` sends the same request through the gRPC
        port. `GET /openapi.json` returns this description for programs, `GET /docs` as a page, and `GET /` is
        the status page.

        Paths marked *health port* are also answered without a certificate on the health port (default 8080).

        An error has a JSON body with the fields below.
    """
    found = document(ENDPOINTS, ACTIONS)
    records = found["components"]["schemas"]
    lines = [*_dedented(intro), "", *_fields_table({"$ref": "/Error"}, records)]
    hidden = {file.path for file in PAGE_FILES} | {"/"}
    for path, methods in found["paths"].items():
        if path not in hidden:
            for method, operation in methods.items():
                lines += _operation(f"{method.upper()} {path}", operation, records)
    return _page("REST API", lines)


def _operation(title: str, operation: Mapping[str, Any], records: Mapping[str, Any]) -> Lines:
    roles, _, public = operation["description"].partition(";")
    port = " *health port*" if public else ""
    yield from (f"## {title}", "", operation["summary"], "", roles.replace("For role", "Roles:") + port, "")
    parameters = [
        (_code(one["name"]), _kind(one["schema"]), one["description"])
        for one in operation.get("parameters", ())
    ]
    yield from _table(("query parameter", "type", "description"), parameters)
    if "requestBody" in operation:
        yield from ("Body:", "")
        [content] = operation["requestBody"]["content"].values()
        yield from _fields_table(content["schema"], records)
    for status, answer in operation["responses"].items():
        if status.startswith("2"):
            [(kind, content)] = answer["content"].items()
            yield from (f"Answer: {status}, `{kind}`.", "")
            yield from _fields_table(content["schema"], records)
    others = ", ".join(sorted(status for status in operation["responses"] if not status.startswith("2")))
    yield from (f"Errors: {others}.", "")


def _fields_table(schema: Mapping[str, Any], records: Mapping[str, Any]) -> Lines:
    yield from _table(("field", "type", "description"), _schema_fields(schema, records))


def _schema_fields(
    schema: Mapping[str, Any], records: Mapping[str, Any], path: str = ""
) -> Iterator[tuple[str, str, str]]:
    if "$ref" in schema:
        schema = records[schema["$ref"].rpartition("/")[2]]
    for one in schema.get("anyOf", ()):
        yield from _schema_fields(one, records, path)
    if "items" in schema:
        yield from _schema_fields(schema["items"], records, f"{path}[]")
    required = schema.get("required")
    for name, one in schema.get("properties", {}).items():
        here = f"{path}.{name}" if path else name
        optional = "" if required is None or name in required else ", optional"
        yield _code(here), _kind(one) + optional, one.get("description", "")
        yield from _schema_fields(one, records, here)


def _kind(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " or ".join(_code(str(value)) or "empty" for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"])
    kind = "object" if "$ref" in schema else schema.get("type", "")
    return " or ".join(kind) if isinstance(kind, list) else kind


# docs/metrics.md

GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "Is the node ready?": (
        *(
            "rt_is_ready",
            "rt_node_phase",
            "rt_control",
            "rt_is_leader",
            "rt_has_leader",
            "rt_peer_",
            "rt_raft",
        ),
        *("rt_alarms", "rt_info", "rt_feature_level", "rt_certificate"),
    ),
    "Is anything stuck?": (
        *(
            "rt_control_silent",
            "rt_reset_running",
            "rt_merge_stopped",
            "rt_merge_catching",
            "rt_merge_lag",
            "rt_member_",
            "rt_replication_lag",
            "rt_stuck_pushes",
            "rt_silent_publishers",
        ),
        *("rt_subscriber_lag", "rt_hold_lag", "rt_rejections", "rt_control_silent", "rt_reset_running"),
    ),
    "Is anything lost?": (
        *("rt_corrupt", "rt_repaired", "rt_last_corruption"),
        *(
            "rt_corrupt",
            "rt_repaired",
            "rt_last_corruption",
            "rt_subscriber_gaps",
            "rt_runs_cut_short",
            "rt_holds_overridden",
            "rt_holds_refused",
            "rt_trimmed",
        ),
    ),
    "How fast is it?": (
        *("rt_merged_", "rt_committed_", "rt_merge_instructions", "rt_push_", "rt_pull_", "rt_fsync"),
        *("rt_http_requests", "process_"),
    ),
    "What is kept?": (
        *("rt_log_start", "rt_retained", "rt_retention", "rt_hold_max", "rt_holds", "rt_held", "rt_disk"),
    ),
    "Who is connected?": ("rt_sessions", "rt_subscribers", "rt_lease"),
}
"""The questions, in order, with prefixes of metric names. The longest matching prefix counts."""


def metrics_page() -> str:
    """Each metric of a node and of a stream host, by question."""
    intro = """
        Every node answers `GET /metrics` in the Prometheus text format: on its health port (default 8080)
        without a certificate, and on its REST port for operators. Every metric is there from the start. A
        value that is not known yet has no sample or is 0.

        No label names a session, a subscriber or a certificate. `GET /sessions`, `GET /rt-clients` and
        `GET /holds` name them.

        A node sees what a subscriber has pulled, not what the application has read. If a subscriber's own
        copy is trimmed before the application read it, the application gets the event `SkipForward`; no
        metric of a node counts that.

        `rt dashboards --out DIR` writes Grafana dashboards and Prometheus alert rules for these metrics.
    """
    found = list(metrics_of(node_view()))
    grouped: dict[str, list[Metric]] = {question: [] for question in GROUPS}
    for metric in found:
        grouped[_question(metric.name)].append(metric)
    lines = [*_dedented(intro), ""]
    for question, metrics in grouped.items():
        lines += [f"## {question}", "", *_metrics_table(metrics)]
    hosts = """
        ## Stream hosts

        A host of `rt.streams` answers `GET /metrics` if it calls `serve_metrics`. All metrics have the labels
        `provider`, `host` and `queue`.
    """
    engines = """
        ## Engines of queries

        A program with `rt.query` answers `GET /metrics` if it calls `serve_status`. All metrics have the
        label `engine`. Those of single queries begin with `rt_query_`, and can be left out.
    """
    found = metrics_of_queries("", NO_QUERIES)
    return _page(
        "Metrics",
        [
            *(*lines, *_dedented(hosts), "", *_stream_metrics()),
            *("", *_dedented(engines), "", *_metrics_table(found)),
        ],
    )


def _stream_metrics() -> Lines:
    rows = [
        (_code(one.name), one.kind, one.unit, ", ".join(map(_code, one.labels[3:])), one.help)
        for one in stream_metrics_of("", "", [])
    ]
    yield from _table(("metric", "type", "unit", "further label", "description"), rows)


def _question(name: str) -> str:
    fitting = [
        (len(prefix), question)
        for question, prefixes in GROUPS.items()
        for prefix in prefixes
        if name.startswith(prefix)
    ]
    assert fitting, f"{name} is in no group of reference_pages.GROUPS"
    return max(fitting)[1]


def _metrics_table(metrics: Iterable[Any]) -> Lines:
    rows = [
        (_code(one.name), one.kind, one.unit, ", ".join(map(_code, one.labels)), one.help) for one in metrics
    ]
    yield from _table(("metric", "type", "unit", "labels", "description"), rows)


# docs/python-api.md


def python_page() -> str:
    """The public names of rt."""
    import rt
    from rt import aio, errors, events

    intro = """
        The public names, with their signatures and docstrings. A name that is not here is internal and may
        change in any release.
    """
    lines = [*_dedented(intro), "", "## rt", ""]
    for name in sorted(rt.__all__, key=str.lower):
        one = getattr(rt, name)
        if inspect.isfunction(one):
            lines += _function(f"rt.{name}", one)
        elif not isinstance(one, ModuleType) and not _is_error(one):
            lines += _class(f"rt.{name}", one)
    lines += ["## rt.aio", "", *_docstring(aio), *_class("rt.aio.Subscriber", aio.Subscriber)]
    lines += ["## rt.errors", "", *_docstring(errors)]
    for name, one in vars(errors).items():
        if _is_error(one) and one.__module__ == errors.__name__ and not name.startswith("_"):
            lines += _error(name, one)
    lines += ["## rt.events", "", *_docstring(events)]
    for name, one in vars(events).items():
        if inspect.isclass(one) and one.__module__ == events.__name__ and not name.startswith("_"):
            lines += _class(f"rt.events.{name}", one)
    for name in ("rt.streams", "rt.query", "rt.query.spark", "rt.objects", "rt.otel"):
        module = importlib.import_module(name)
        lines += [f"## {name}", "", *_docstring(module)]
        rows = [(_code(each), _summary(getattr(module, each))) for each in sorted(module.__all__)]
        lines += _table(("name", "summary"), rows)
    return _page("Python API", lines)


def _is_error(one: object) -> bool:
    return inspect.isclass(one) and issubclass(one, Exception)


def _summary(one: object) -> str:
    if not (inspect.isclass(one) or callable(one)):
        return "A constant."
    return inspect.cleandoc(getattr(one, "__doc__", None) or "").split("\n\n")[0]


def _docstring(one: object, text: str | None = None) -> Lines:
    """A docstring as Markdown: indented blocks become text blocks, definition lines stay together."""
    found = text if text is not None else inspect.getdoc(one) or ""
    for block in re.split(r"\n\n(?!  )", found):
        head, _, rest = block.partition("\n\n")
        for part in (head, rest):
            if part.startswith("    "):
                yield from ("```text", *textwrap.dedent(part).splitlines(), "```", "")
            elif part:
                yield from (*part.splitlines(), "")


def _error(name: str, one: type[Exception]) -> Lines:
    bases = ", ".join(base.__name__ for base in one.__bases__)
    retriable = "yes" if getattr(one, "retriable", False) else "no"
    yield from (f"### rt.{name}", "", f"Base: `{bases}`. Can be retried: {retriable}.", "")
    yield from _docstring(one)


def _function(path: str, one: Callable[..., Any], *, level: str = "###") -> Lines:
    name = path.rpartition(".")[2] if level != "###" else path
    yield from (f"{level} {path}()", "", "```text", *_signature(name, one), "```", "")
    yield from _docstring(one)


def _class(path: str, one: Any) -> Lines:
    yield from (f"### {path}", "")
    if not issubclass(one, enum.Enum):
        yield from ("```text", *_signature(path, one), "```", "")
    yield from _own_docstring(one)
    for name, member in sorted(_members(one), key=lambda item: item[0]):
        if isinstance(member, property):
            yield from (f"#### {path}.{name}", "")
            yield from _docstring(member)
        else:
            function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            yield from _function(f"{path}.{name}", function, level="####")


def _own_docstring(one: Any) -> Lines:
    text = inspect.cleandoc(one.__doc__ or "")
    if not text.startswith(f"{one.__name__}("):
        yield from _docstring(one, text)


def _members(one: Any) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that rt defines, including those of private bases."""
    found: dict[str, Any] = {}
    for base in reversed(one.__mro__):
        if base.__module__.startswith("rt."):
            found |= vars(base)
    for name, member in found.items():
        if not name.startswith("_") and _is_documented(member):
            yield name, member


def _is_documented(member: object) -> bool:
    if isinstance(member, classmethod | staticmethod):
        return bool(member.__func__.__doc__)
    return (isinstance(member, property) or inspect.isfunction(member)) and bool(member.__doc__)


def _signature(name: str, one: Callable[..., Any]) -> list[str]:
    signature = inspect.signature(one)
    # The signature of a record has resolved annotations. The page shows them as they are written.
    written = inspect.get_annotations(one) if inspect.isclass(one) and issubclass(one, Struct) else {}
    parameters = [
        each.replace(annotation=written.get(each.name, each.annotation))
        for each in signature.parameters.values()
        if each.name not in {"self", "cls"}
    ]
    result = signature.return_annotation
    returns = "" if result is signature.empty or inspect.isclass(one) else f" -> {_annotation(result)}"
    parts, has_star = [], False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not has_star:
            parts.append("*")
            has_star = True
        has_star |= parameter.kind is parameter.VAR_POSITIONAL
        parts.append(_parameter(parameter))
    line = f"{name}({', '.join(parts)}){returns}"
    if len(line) <= 100:
        return [line]
    return [f"{name}(", *(f"    {part}," for part in parts), f"){returns}"]


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = f"{stars}{parameter.name}"
    if parameter.annotation is not parameter.empty:
        text += f": {_annotation(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        value = repr(parameter.default)
        text += f" = {'...' if ' at 0x' in value or value.startswith('<') else value}"
    return text


def _annotation(annotation: object) -> str:
    if isinstance(annotation, str):
        return annotation
    return annotation.__name__ if inspect.isclass(annotation) else str(annotation)


def _dedented(text: str) -> list[str]:
    return textwrap.dedent(text).strip().splitlines()


PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "cli.md": cli_page,
    "configuration.md": configuration_page,
    "rest-api.md": rest_page,
    "metrics.md": metrics_page,
    "python-api.md": python_page,
}

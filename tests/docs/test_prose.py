"""Pages, command help, error texts and log records avoid the listed words and phrases.

The test ignores code spans, code blocks and comments of pages.

`tests/testdata/prose/allowed.txt` lists the remaining uses, as `path: word`. It only shrinks: an unneeded
entry fails the test, and `--rewrite` removes such entries without adding any.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import click
import pytest
from reference_pages import commands

ROOT: Final = Path(__file__).parents[2]
ALLOWED: Final = ROOT / "tests" / "testdata" / "prose" / "allowed.txt"
PACKAGES: Final = ("archiver", "pyspark_rt", "replicator", "rt", "sequencer")
LEVELS: Final = frozenset({"debug", "info", "warning", "error", "exception", "critical"})


class Rule(NamedTuple):
    """A word or phrase to avoid, the pattern that finds it, and its replacement."""

    word: str
    pattern: re.Pattern[str]
    instead: str


def _rule(word: str, instead: str, pattern: str | None = None) -> Rule:
    return Rule(word, re.compile(pattern or rf"\b{word}\b", re.IGNORECASE), instead)


RULES: Final = (
    _rule("anew", "again, from scratch"),
    _rule(
        "behind",
        "after; a lag is fine: falls behind, 5 messages behind",
        r"(?<!falls )(?<!fall )(?<!fell )(?<!falling )(?<!messages )(?<!bytes )(?<!is )(?<!are )"
        r"(?<!further )(?<!furthest )(?<!far )(?<!farthest )(?<!left )"
        r"\bbehind\b(?! by\b)(?! (?:a|the|an) (?:[\w-]+ )?(?:proxy|load balancer|firewall|gateway|NAT)\b)",
    ),
    _rule("by custom", "by default"),
    _rule("for ever", "indefinitely, until stopped"),
    _rule("gone", "trimmed, deleted, disconnected"),
    _rule(
        "had",
        "read, received, contained; as an auxiliary it is fine: had read, had not acknowledged",
        r"\bhad\b(?! (?:(?:not|already|never|just) )*"
        r"(?:\w+ed|been|begun|found|gone|kept|left|lost|read|seen|sent|taken|written)\b)",
    ),
    _rule(
        "is to",
        "must, will",
        r"(?<!way )(?<!goal )(?<!aim )(?<!job )(?<!step )(?<!task )(?<!fix )(?<!repair )(?<!idea )"
        r"\b(?:is|are|was|were) to (?!(?:a|an|the|this|that|its|each|every|one|all)\b)",
    ),
    _rule("lacks", "is missing"),
    _rule("let go", "release", r"\blet(?:s|ting)? go\b"),
    _rule("life", "run, incarnation", r"(?<!end of )\blife\b(?![ -]?(?:cycle|time))"),
    _rule("meant", "configured, intended"),
    _rule("nobody", "no node, no client"),
    _rule("said", "reported, set"),
    _rule("so many", "the number, with its unit", r"\bso many\b"),
    _rule("so much", "the size, with its unit", r"\b(?:so much|as much as)\b(?! (?:possible|you))"),
    _rule("so old", "the age, with its unit"),
    _rule("the books", "the registry, the checkpoints"),
    _rule("the X", "the run number", r"\bthe X\b"),
    _rule("told", "reported, set, called"),
    _rule("wants", "needs, expects"),
    _rule("whoever", "the client that, the process that", r"\bwho(?:m|so)?ever\b"),
    _rule("whom", "which client, which node"),
)


def problems(text: str) -> Iterator[Rule]:
    """The rules that a text breaks."""
    line = " ".join(text.split())
    return (rule for rule in RULES if rule.pattern.search(line))


# Texts to check


def page_texts() -> Iterator[tuple[str, str]]:
    """Each paragraph of the pages."""
    folders = ("", "docs/**/", "examples/", "helm/")
    for path in sorted(path for folder in folders for path in ROOT.glob(f"{folder}*.md")):
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"^ *(```+|~~~+).*?^ *\1 *$", "", text, flags=re.MULTILINE | re.DOTALL)
        text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
        text = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "`", text, flags=re.DOTALL)
        text = re.sub(r"\]\([^)]*\)", "]", text)
        for paragraph in re.split(r"\n\s*\n", text):
            yield str(path.relative_to(ROOT)), paragraph


def help_texts() -> Iterator[tuple[str, str]]:
    """The help of each command and option, by the file of the command."""
    for _, command in commands():
        if command.callback is None:
            continue
        path = str(Path(inspect.unwrap(command.callback).__code__.co_filename).relative_to(ROOT))
        yield path, command.help or ""
        yield path, command.epilog or ""
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                yield path, parameter.help or ""


Sources = dict[str, list[ast.AST]]
"""All nodes of each module, by its path."""


def sources() -> Sources:
    """The modules of the product."""
    return {
        str(path.relative_to(ROOT)): [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if "v1" not in path.parts
    }


def _name(node: ast.expr | None) -> str:
    """Return the last part of a dotted name. The name may be in quotes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.rpartition(".")[2]
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def error_classes(modules: Sources) -> set[str]:
    """`RtError` and the names of all classes below it."""
    bases = {
        node.name: {_name(base) for base in node.bases}
        for nodes in modules.values()
        for node in nodes
        if isinstance(node, ast.ClassDef)
    }
    found, before = {"RtError"}, 0
    while len(found) != before:
        before = len(found)
        found |= {name for name, above in bases.items() if above & found}
    return found


def error_texts(modules: Sources) -> Iterator[tuple[str, str]]:
    """The literals passed to an error, or to a function of the same module that returns an error."""
    classes = error_classes(modules)
    for path, nodes in modules.items():
        makers = {
            node.name
            for node in nodes
            if isinstance(node, ast.FunctionDef) and _name(node.returns) in classes
        }
        named = classes | makers
        for node in nodes:
            if isinstance(node, ast.Call) and _name(node.func) in named:
                for one in (*node.args, *(keyword.value for keyword in node.keywords)):
                    yield path, _literal(one)


def _literal(node: ast.expr) -> str:
    """The text of all literals in an expression, with "…" for each value in a text."""
    texts = []
    for one in ast.walk(node):
        if isinstance(one, ast.JoinedStr):
            texts.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in one.values))
        elif isinstance(one, ast.Constant) and isinstance(one.value, str):
            texts.append(one.value)
    return " | ".join(texts)


def log_texts(modules: Sources) -> Iterator[tuple[str, str]]:
    """Names and keys of log records, as words."""
    for path, nodes in modules.items():
        for node in nodes:
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
                continue
            if node.func.attr in LEVELS and "log" in _name(node.func.value).lower():
                yield path, _literal(node.args[0]).replace("_", " ").replace("=", " ")


def found_problems() -> dict[tuple[str, str], str]:
    """Each path and word, with a text that breaks the rule."""
    modules = sources()
    found: dict[tuple[str, str], str] = {}
    for texts in (page_texts(), help_texts(), error_texts(modules), log_texts(modules)):
        for path, text in texts:
            for rule in problems(text):
                shown = " ".join(text.split())
                at = rule.pattern.search(shown)
                start = max(at.start() - 60, 0) if at else 0
                found.setdefault((path, rule.word), f"…{shown[start : start + 140]}… ({rule.instead})")
    return found


def allowed() -> set[tuple[str, str]]:
    lines = ALLOWED.read_text(encoding="utf-8").splitlines() if ALLOWED.exists() else []
    pairs = (line.partition(": ") for line in lines if line and not line.startswith("#"))
    return {(path, word) for path, _, word in pairs}


HEAD: Final = "# Words of tests/docs/test_prose.py that are still used. This list only shrinks.\n"


@pytest.mark.slow
def test_user_facing_text_has_only_allowed_prose_problems(request: pytest.FixtureRequest) -> None:
    found, known = found_problems(), allowed()
    if request.config.getoption("--rewrite"):
        known &= found.keys()
        ALLOWED.write_text(HEAD + "".join(f"{path}: {word}\n" for path, word in sorted(known)))

    new = [
        f"{path}: {word}: {text}" for (path, word), text in sorted(found.items()) if (path, word) not in known
    ]
    assert new == [], "\n" + "\n".join(new)
    unneeded = sorted(f"{path}: {word}" for path, word in known - found.keys())
    assert unneeded == [], f"remove from {ALLOWED.name} (--rewrite does)"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("What lies behind it is gone for ever.", ["behind", "for ever", "gone"]),
        ("The node runs behind a proxy, behind the TLS load balancer, and falls behind.", []),
        ("It is 5 messages behind. That is behind.", []),
        ("Nobody wants it;\nwhoever said so", ["nobody", "said", "wants", "whoever"]),
        ("A file of so much is to be sealed.", ["is to", "so much"]),
        ("The next step is to restart. It is to the left.", []),
        ("It lets go of the lease in its next life.", ["let go", "life"]),
        ("It had not acknowledged what it had read.", []),
        ("The lifetime and the life cycle; it lives in DIR; the X509 file.", []),
        ("Hadoop hadn't; a foretold event", []),
    ],
)
def test_prose_rules_find_expected_words(text: str, words: list[str]) -> None:
    assert sorted(rule.word for rule in problems(text)) == words


def test_error_and_log_texts_are_extracted_from_source(tmp_path: Path) -> None:
    text = (
        "class Odd(RtError): pass\n"
        "def bad(what) -> Odd: return Odd(what)\n"
        'raise bad(f"{x} nobody")\n'
        'raise Odd("a", hint="b" if y else "c gone")\n'
        'logger.info("node_gone name=%s", 1)\n'
    )
    modules = {"m.py": [*ast.walk(ast.parse(text))]}

    assert sorted(text for _, text in error_texts(modules)) == ["", "a", "b | c gone", "… nobody |  nobody"]
    assert [text for _, text in log_texts(modules)] == ["node gone name %s"]

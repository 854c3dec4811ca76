"""Small mistakes made in a correct program, one at a time, from its syntax tree.

Each operator is a function that takes a node and gives the nodes that could stand in
its place, each with a few words on what was changed.
"""

import ast
import copy
import functools
from collections.abc import Iterator

ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Pow: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
ONE_WAY = ast.Sub | ast.Div | ast.FloorDiv | ast.Pow | ast.MatMult  # a . b is not b . a
COMPARISON = {
    ast.Lt: [ast.LtE, ast.Gt],
    ast.LtE: [ast.Lt, ast.GtE],
    ast.Gt: [ast.GtE, ast.Lt],
    ast.GtE: [ast.Gt, ast.LtE],
    ast.Eq: [ast.NotEq],
    ast.NotEq: [ast.Eq],
    ast.In: [ast.NotIn],
    ast.NotIn: [ast.In],
    ast.Is: [ast.IsNot],
    ast.IsNot: [ast.Is],
}
TWINS = [
    "min max",
    "sin cos",
    "sum mean",
    "log exp",
    "tril triu",
    "ceil floor",
    "softmax log_softmax",
    "zeros ones",
    "append extend",
]
NAMES = {a: b for pair in TWINS for a, b in (pair.split(), pair.split()[::-1])}
Change = tuple[str, ast.AST]


def arithmetic(node: ast.AST) -> Iterator[Change]:
    """+ for -, * for /, and the two sides exchanged where that matters."""
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in ARITHMETIC:
        new = copy.deepcopy(node)
        new.op = ARITHMETIC[type(node.op)]()
        yield "another operator", new
    if isinstance(node, ast.BinOp) and isinstance(node.op, ONE_WAY):
        new = copy.deepcopy(node)
        new.left, new.right = new.right, new.left
        yield "the two sides exchanged", new


def comparison(node: ast.AST) -> Iterator[Change]:
    """<= for <, > for <, == for !=."""
    if isinstance(node, ast.Compare):
        for turned in COMPARISON[type(node.ops[0])]:
            new = copy.deepcopy(node)
            new.ops[0] = turned()
            yield "another comparison", new


def logic(node: ast.AST) -> Iterator[Change]:
    """`and` for `or`; a condition denied."""
    if isinstance(node, ast.BoolOp):
        new = copy.deepcopy(node)
        new.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        yield "and, or exchanged", new
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        new = copy.deepcopy(node)
        new.test = ast.UnaryOp(ast.Not(), new.test)
        yield "condition denied", new
    if isinstance(node, ast.comprehension):
        for i in range(len(node.ifs)):
            new = copy.deepcopy(node)
            del new.ifs[i]
            yield "condition dropped", new


def number(node: ast.AST) -> float | None:
    """The value of a number with its sign; None for anything else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = number(node.operand)
        return None if value is None else -value
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    return None


def constant(node: ast.AST) -> Iterator[Change]:
    """A number moved by one or negated, a truth value turned, a string changed."""
    if (value := number(node)) is not None:
        for other in (value + 1, value - 1, -value):
            if other != value:  # of zeros there is one
                yield "another number", ast.Constant(other)
    elif isinstance(node, ast.UnaryOp):
        yield "sign or negation dropped", copy.deepcopy(node.operand)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "truth value turned", ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield "string changed", ast.Constant(node.value + "x")


def argument(node: ast.AST) -> Iterator[Change]:
    """An argument left out, or exchanged with its neighbor."""
    if not isinstance(node, ast.Call):
        return
    for i in range(len(node.args)):
        new = copy.deepcopy(node)
        del new.args[i]
        yield "argument dropped", new
    for i, keyword in enumerate(node.keywords):
        if is_strict(keyword):
            continue
        new = copy.deepcopy(node)
        del new.keywords[i]
        yield "keyword dropped", new
    for i in range(len(node.args) - 1):
        new = copy.deepcopy(node)
        new.args[i : i + 2] = new.args[i : i + 2][::-1]
        yield "arguments exchanged", new


def call(node: ast.AST) -> Iterator[Change]:
    """A call left out: f(x) becomes x, and x.f() becomes x."""
    if not isinstance(node, ast.Call):
        return
    if isinstance(node.func, ast.Attribute):
        yield "method left out", copy.deepcopy(node.func.value)
    if node.args and not isinstance(node.args[0], ast.Starred | ast.GeneratorExp):
        yield "function left out", copy.deepcopy(node.args[0])


def twin(node: ast.AST) -> Iterator[Change]:
    """min for max, sin for cos, tril for triu."""
    if isinstance(node, ast.Name) and node.id in NAMES:
        yield "twin function", ast.Name(NAMES[node.id], node.ctx)
    if isinstance(node, ast.Attribute) and node.attr in NAMES:
        new = copy.deepcopy(node)
        new.attr = NAMES[node.attr]
        yield "twin function", new


def place(node: ast.AST) -> Iterator[Change]:
    """A bound of a slice left out, an index left out, neighbors exchanged."""
    if isinstance(node, ast.Slice):
        for bound in ("lower", "upper", "step"):
            if getattr(node, bound) is not None:
                new = copy.deepcopy(node)
                setattr(new, bound, None)
                yield "bound of a slice dropped", new
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        yield "index left out", copy.deepcopy(node.value)
    if isinstance(node, ast.Tuple | ast.List) and isinstance(node.ctx, ast.Load):
        for i in range(len(node.elts) - 1):
            new = copy.deepcopy(node)
            new.elts[i : i + 2] = new.elts[i : i + 2][::-1]
            yield "neighbors exchanged", new


def statement(node: ast.AST) -> Iterator[Change]:
    """A statement left out; a loop left after its first round."""
    if isinstance(node, ast.Assign | ast.AugAssign | ast.Expr | ast.If | ast.For):
        yield "statement left out", ast.Pass()
    if isinstance(node, ast.Continue):
        yield "continue left out", ast.Pass()
        yield "break for continue", ast.Break()
    if isinstance(node, ast.For):
        new = copy.deepcopy(node)
        new.body.append(ast.Break())
        yield "only the first round", new
    if isinstance(node, ast.If) and node.orelse:
        new = copy.deepcopy(node)
        new.orelse = []
        yield "else left out", new


OPERATORS = [
    arithmetic,
    comparison,
    logic,
    constant,
    argument,
    call,
    twin,
    place,
    statement,
]


def exchanged_names(function: ast.FunctionDef) -> Iterator[tuple[ast.AST, Change]]:
    """One parameter taken for the next."""
    names = [argument.arg for argument in function.args.args]
    after = dict(zip(names, names[1:] + names[:1], strict=True))
    for node in written(function):
        read = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        if read and after.get(node.id, node.id) != node.id:
            yield node, ("another parameter", ast.Name(after[node.id], node.ctx))


def written(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of what a reader writes: the body without the docstring.

    A number comes with its sign, as one node; `strict` of `zip` changes no result that
    is right, so it is left as it is.
    """
    has_docstring = ast.get_docstring(function) is not None
    todo = list(function.body[has_docstring:])
    while todo:
        node = todo.pop(0)
        yield node
        if number(node) is None:
            children = ast.iter_child_nodes(node)
            todo = [n for n in children if not is_strict(n)] + todo


def is_strict(node: ast.AST) -> bool:
    return isinstance(node, ast.keyword) and node.arg == "strict"


class Replace(ast.NodeTransformer):
    """Put one node in the place of another."""

    def __init__(self, old: ast.AST, new: ast.AST):
        self.old, self.new = old, new

    def visit(self, node):
        return self.new if node is self.old else self.generic_visit(node)


def replaced(tree: ast.Module, old: ast.AST, new: ast.AST) -> str | None:
    """The program with one node replaced; None where Python refuses it."""
    memo: dict = {}
    copied = copy.deepcopy(tree, memo)
    changed = Replace(memo[id(old)], new).visit(copied)
    try:
        text = ast.unparse(ast.fix_missing_locations(changed))
        compile(text, "mutant", "exec")
    except (SyntaxError, ValueError):
        return None
    return text


def difference(before: str, after: str) -> str:
    """The lines that differ, as one line: what a mutant is called.

    The new line where one line became another; else what is gone, after the word
    `without`, or what has come, after the word `with`.
    """
    old, new = before.splitlines(), after.splitlines()
    while old and new and old[0] == new[0]:
        old, new = old[1:], new[1:]
    while old and new and old[-1] == new[-1]:
        old, new = old[:-1], new[:-1]
    gone, come = (" ".join(" ".join(part).split()) for part in (old, new))
    if come in ("", "pass"):
        return f"without {gone}"
    return come if gone else f"with {come}"


@functools.cache
def mutants(solution: str) -> dict[str, tuple[str, str]]:
    """Every mutant of a program once: its name, to what was done and its text."""
    tree = ast.parse(solution)
    original = ast.unparse(tree)
    seen = {original}
    found: dict[str, tuple[str, str]] = {}
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        changes = [
            (node, change)
            for node in written(function)
            for operator in OPERATORS
            for change in operator(node)
        ]
        for node, (what, new) in [*changes, *exchanged_names(function)]:
            text = replaced(tree, node, new)
            if text is None or text in seen:
                continue
            seen.add(text)
            name = difference(original, text)
            while name in found:
                name += " (elsewhere)"
            found[name] = what, text
    return found
